"""`megatron-rl migrate`: a configuration of verl, NeMo-RL or TRL as a recipe, on the standard output."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_rl.migrate import migrate
from megatron_rl.runtime import exit_codes

_FRAMEWORKS = {"verl": "verl", "nemo-rl": "nemo", "trl": "trl"}


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("configuration", metavar="FILE", type=Path, help="YAML, or a launch script with key=value")
    parser.add_argument(
        "overrides", metavar="KEY=VALUE", nargs="*", default=[], help="in the other framework's words, on top"
    )
    parser.add_argument(
        "--from", dest="framework", choices=list(_FRAMEWORKS), help="whose it is (default: found by its keys)"
    )
    parser.add_argument("--prompts", metavar="N", type=int, help="training prompts, which turn epochs into steps")


def run(args: argparse.Namespace) -> int:
    """0, or 2 for a file that is none of the three's."""
    framework = _FRAMEWORKS[args.framework] if args.framework else None
    print(migrate(args.configuration, args.overrides, framework=framework, prompts=args.prompts), end="")
    return exit_codes.OK
