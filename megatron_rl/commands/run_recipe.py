"""`train`, `sft`, `reward-model`: checks the recipe and starts one process per device (or joins another launcher's world)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_rl.agents.template_remarks import template_remarks_of_folder
from megatron_rl.commands.packages import require_torch
from megatron_rl.config import Config, ConfigError, Machine, check_machine, load_recipe, to_yaml
from megatron_rl.config.inactive import check_overrides
from megatron_rl.launch.ranks import RankLaunch, machine_here
from megatron_rl.preflight.recipe import check_recipe
from megatron_rl.runtime import exit_codes


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[], help="overrides, e.g. trainer.steps=5")
    add_check(parser)
    parser.add_argument(
        "--resume",
        metavar="auto|PATH|never",
        default="auto",
        help="auto: the newest complete checkpoint of run_dir, if any (default); PATH: that checkpoint",
    )


def add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="check the recipe, print it resolved, start nothing")
    parser.add_argument(
        "--processes",
        metavar="N",
        type=_positive,
        help="with --check: for N processes on other machines, not for this one",
    )


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Returns 0, 2 for a bad recipe, 130 after Ctrl-C, or the exit code of a failed process."""
    machine, world = machine_here()
    machine = machine_asked_for(args, machine)
    check_overrides(args.overrides, args.command)
    config = check_recipe(load_recipe(args.recipe, args.overrides), args.command, machine, recipe=args.recipe)
    resume = _resume(args.resume)
    if args.check:
        for sentence in template_remarks_of_folder(config):
            print(f"megatron-rl: {sentence}", file=sys.stderr)
        return print_checked(config, machine if args.processes is None else None, args.command)
    check_machine(config, machine, args.command)
    require_torch(args.command)
    return RankLaunch(args.command, config, resume, machine, world).start()


def machine_asked_for(args: argparse.Namespace, machine: Machine) -> Machine:
    """The machine that the recipe is checked for: this one, or with --processes N whatever has N processes.

    Those are another launcher's, so `args.overrides` then leave out the recipe's `launch.processes`, as the batch scripts do.

    Raises:
        ConfigError: --processes without --check.
    """
    if args.processes is None:
        return machine
    if not args.check:
        raise ConfigError(
            f"--processes {args.processes} needs --check; launch.processes={args.processes} starts that many here"
        )
    args.overrides = [*args.overrides, "launch.processes=null"]
    return Machine(world_size=args.processes)


def print_checked(config: Config, machine: Machine | None, command: str) -> int:
    """Prints the recipe. It must fit the number of processes where that is given, for example by a batch script.
    `machine`: None where the recipe is to run elsewhere.
    """
    print(to_yaml(config), end="")
    if machine is None:
        return exit_codes.OK
    try:
        check_machine(config, machine, command)
    except ConfigError as error:
        print(f"megatron-rl: the recipe is fine, but not for this machine: {error}", file=sys.stderr)
        return exit_codes.OK if machine.world_size is None else exit_codes.BAD_INPUT
    return exit_codes.OK


def _resume(mode: str) -> str:
    if mode in ("auto", "never"):
        return mode
    if not Path(mode).is_dir():
        raise ConfigError(f"--resume {mode}: no such folder; give auto, never, or the path of a checkpoint")
    return str(Path(mode).resolve())
