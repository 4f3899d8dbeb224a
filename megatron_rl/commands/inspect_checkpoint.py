"""`megatron-rl inspect DIR [DIR2]`: what a checkpoint holds, or how two differ."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from megatron_rl.base.messages import ConfigError, errors_named
from megatron_rl.runtime import exit_codes

if TYPE_CHECKING:
    from megatron_rl.checkpoint.contents import Comparison, Contents

_SHOWN = 20  # tensors of a comparison, unless --tensors


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("other", type=Path, metavar="DIR2", nargs="?", help="compare with this one")
    parser.add_argument("--tensors", action="store_true", help="a line for every tensor")
    parser.add_argument("--check", action="store_true", help="read everything and compare checksums")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--config", type=Path, metavar="DIR", help="Hugging Face folder of a plain Megatron checkpoint")


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 1 where --check found damage.

    Raises:
        ConfigError: a folder that cannot be read.
    """
    from megatron_rl.checkpoint.contents import contents, difference

    console = Console(highlight=False)
    with errors_named("", ValueError, OSError, as_error=ConfigError):
        if args.other is not None:
            comparison = difference(args.folder, args.other, args.config)
            if args.json:
                print(json.dumps(asdict(comparison) | {"identical": comparison.identical}, indent=1))
            else:
                _show_comparison(console, comparison, args.tensors)
            return exit_codes.OK
        checkpoint = contents(args.folder, args.check)
    if args.json:
        print(json.dumps(checkpoint.as_json(args.tensors), indent=1))
    else:
        _show_contents(console, checkpoint, args.tensors)
    return exit_codes.FAILED if checkpoint.damage else exit_codes.OK


def _show_contents(console: Console, checkpoint: Contents, tensors: bool) -> None:
    facts = Table(show_header=False, box=None, pad_edge=False)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("folder", checkpoint.folder)
    facts.add_row("kind", checkpoint.kind)
    for key, value in checkpoint.about.items():
        if value is not None:
            facts.add_row(key, _shown(value))
    for part, total in checkpoint.totals().items():
        dtypes = ", ".join(f"{dtype} {_size(count)}" for dtype, count in sorted(total["dtypes"].items()))
        what = {"model": "weights", "optimizer": "optimizer state"}[part]
        facts.add_row(what, f"{total['tensors']} tensors, {total['values']:,} values, {dtypes}")
    facts.add_row("files", f"{len(checkpoint.files)}, {_size(sum(checkpoint.files.values()))}")
    console.print(facts)
    if tensors:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("tensor", overflow="fold")
        for name in ("shape", "dtype", "size", "pieces"):
            table.add_column(name, justify="right", no_wrap=True)
        for tensor in checkpoint.tensors:
            shape = "x".join(map(str, tensor.shape))
            table.add_row(tensor.name, shape, tensor.dtype, _size(tensor.nbytes), str(tensor.pieces))
        console.print()
        console.print(table)
    if checkpoint.damage is not None:
        console.print()
        if not checkpoint.damage:
            console.print("[green]every checksum fits[/]")
        for problem in checkpoint.damage:
            console.print(problem, style="red", markup=False)


def _show_comparison(console: Console, comparison: Comparison, everything: bool) -> None:
    for names, which in ((comparison.only_first, "first"), (comparison.only_second, "second")):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            console.print(f"only in the {which}: {', '.join(names[:5])}{more}", style="red", markup=False)
    differing = [d for d in comparison.tensors if d.changed or d.problem]
    if comparison.identical:
        console.print(f"[green]identical: {len(comparison.tensors)} tensors[/]")
        return
    console.print(f"{len(differing)} of {len(comparison.tensors)} tensors differ")
    differing.sort(key=lambda d: -d.relative)
    shown = differing if everything else differing[:_SHOWN]
    if not shown:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("tensor", overflow="fold")
    for name in ("changed values", "max |difference|", "relative L2"):
        table.add_column(name, justify="right", no_wrap=True)
    for d in shown:
        if d.problem:
            table.add_row(d.name, d.problem, "", "")
        else:
            table.add_row(d.name, f"{100 * d.changed / d.values:.3g}%", f"{d.max_abs:.3e}", f"{d.relative:.3e}")
    console.print(table)
    if len(shown) < len(differing):
        console.print(f"and {len(differing) - len(shown)} more (--tensors shows all)")


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items() if item is not None)
    return ", ".join(map(_shown, value)) if isinstance(value, list) else str(value)


def _size(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
