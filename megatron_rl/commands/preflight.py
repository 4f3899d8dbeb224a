"""`megatron-rl preflight RECIPE`: whether these machines are fit for the recipe, with the name of the node that is not."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from megatron_rl.commands.numbers import number
from megatron_rl.commands.packages import require_torch
from megatron_rl.config import check, load_recipe
from megatron_rl.launch.ranks import machine_here
from megatron_rl.runtime import exit_codes, stop, streams
from megatron_rl.runtime.attempts import rank_environment
from megatron_rl.runtime.spawn import run_ranks

_DAY = 1440  # minutes


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[], help="overrides, e.g. trainer.steps=5")
    parser.add_argument("--quick", action="store_true", help="what `train` checks by itself: no bandwidth")
    parser.add_argument("--json", action="store_true", help="the whole report as JSON")
    parser.add_argument(
        "--minutes",
        type=number(0.001, above=False, largest=_DAY),
        default=10.0,
        help="how long the ranks wait for each other (default: 10)",
    )


def run(args: argparse.Namespace) -> int:
    """0 for fit, 3 where a node is not, 2 for a recipe that cannot run anywhere."""
    machine, world = machine_here()
    command = [sys.executable, "-m", "megatron_rl.preflight.rank_main", args.recipe, *args.overrides]
    command += ["--minutes", str(args.minutes), *["--quick"] * args.quick, *["--json"] * args.json]
    config = load_recipe(args.recipe, args.overrides)
    if world is None:
        config = check(config, machine=machine)
    require_torch(args.command)
    if world is not None:
        os.environ.update(rank_environment(machine.gpus))
        os.environ.update(world.variables)
        stop.hold_back()
        os.execv(sys.executable, command)
    assert config.launch.processes is not None
    with tempfile.TemporaryDirectory(
        prefix="preflight-"
    ) as logs:  # what they found is in the report, if they came to it
        outcome = run_ranks(command, config.launch.processes, Path(logs), rank_environment(machine.gpus))
        if outcome.message and (outcome.code != exit_codes.PREFLIGHT or outcome.is_ranks_own):
            streams.say(f"megatron-rl: {outcome.message}")
    return outcome.code
