"""The command `megatron-rl`: reads the command line and hands over to the subcommand's module."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Sequence

from megatron_rl import __version__
from megatron_rl.base.messages import ConfigError
from megatron_rl.commands import COMMANDS, load, packages
from megatron_rl.runtime import stop, streams
from megatron_rl.runtime.attempts import outer_world
from megatron_rl.seams.known_warnings import quiet_known_warnings

_EPILOG = """\
examples:
  megatron-rl train recipes/cpu/quickstart.yaml
  megatron-rl train recipes/cpu/quickstart.yaml algorithm.preset=gdpo trainer.steps=5
  megatron-rl train recipes/cpu/quickstart.yaml --check
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code (`megatron_rl.runtime.exit_codes`)."""
    quiet_known_warnings()
    with stop.raising():
        try:
            args = _parse(sys.argv[1:] if arguments is None else list(arguments))
            return load(args.command).run(args)
        except ConfigError as error:
            _say_once_per_node(error)
            return error.code
        except ModuleNotFoundError as error:
            if (why := packages.explanation(error)) is None:
                raise
            _say_once_per_node(ConfigError(why))
            return ConfigError.code
        except KeyboardInterrupt:
            streams.say("megatron-rl: stopped by SIGINT")
            return 128 + signal.SIGINT


def _say_once_per_node(error: ConfigError) -> None:
    """Prints an error by the first process of each node that torchrun or srun has started one on: a node may lack what others
    have."""
    world = outer_world(os.environ)
    if world is None or world.variables.get("LOCAL_RANK", world.variables["RANK"]) == "0":
        where = "" if world is None else f"on node {socket.gethostname()}: "
        streams.say(f"megatron-rl: {where}{error}")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megatron-rl",
        description="Reinforcement learning for large language models on Megatron-Core and vLLM.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, summary) in COMMANDS.items():
        subparser = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name in arguments[:1]:  # the others' modules are not needed
            load(name).add_arguments(subparser, name)
    args, rest = parser.parse_known_args(arguments)
    # argparse gives up on positionals after an option: `train RECIPE --check a.b=1` leaves the override over.
    overrides = getattr(args, "overrides", None)
    unknown = [text for text in rest if overrides is None or text.startswith("-") or "=" not in text]
    for text in unknown:
        name = text.lstrip("-").partition("=")[0]
        if overrides is not None and text.startswith("--") and "." in name:
            parser.error(f"unrecognized argument {text}: overrides have no dashes: {text.lstrip('-')}")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if overrides is not None:
        overrides += rest
    return args
