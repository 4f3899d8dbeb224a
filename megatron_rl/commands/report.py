"""`megatron-rl report RUN …`: one HTML page with findings, curves, times, rollouts to read; several runs side by side."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from megatron_rl.runtime import disk, exit_codes


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run folder; several are laid side by side")
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="the page (default: RUN/report.html; report.html here for several runs)",
    )


def run(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("matplotlib") is None:
        print(
            "megatron-rl: report draws with matplotlib, which is not installed: pip install matplotlib", file=sys.stderr
        )
        return exit_codes.FAILED
    from megatron_rl.report import find, read_run, render

    try:
        records = [read_run(path.resolve()) for path in args.runs]
    except ValueError as error:
        print(f"megatron-rl: {error}", file=sys.stderr)
        return exit_codes.BAD_INPUT
    default = records[0].path / "report.html" if len(records) == 1 else Path("report.html")
    output: Path = args.output or default
    try:
        disk.replace(output, render(records))
    except OSError as error:
        print(
            f"megatron-rl: cannot write {output}: {error.strerror}; name another place with --output", file=sys.stderr
        )
        return exit_codes.FAILED
    for record in records:
        for finding in find(record):
            print(f"{record.name}: {finding.level}: {finding.text}")
    print(f"the page: {output}")
    return exit_codes.OK
