"""`megatron-rl status RUN`: what a run is doing or why it stopped, and how to continue. Reads the run folder only."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path

from megatron_rl.commands.numbers import number
from megatron_rl.report.status import read_status
from megatron_rl.runtime import exit_codes

_DAY = 86_400  # seconds


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="run folder")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.add_argument(
        "--follow",
        metavar="SECONDS",
        type=number(0, above=False, largest=_DAY),
        help="again every so many seconds, until the run ends",
    )


def run(args: argparse.Namespace) -> int:
    """0, or 2 for a folder that is no run folder."""
    while True:
        status = read_status(args.run)
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(json.dumps(asdict(status), indent=1) if args.json else status.text(width), flush=True)
        if args.follow is None or status.state not in ("running", "starting"):
            return exit_codes.OK
        time.sleep(max(0.1, args.follow))
