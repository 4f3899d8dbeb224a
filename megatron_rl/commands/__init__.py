"""The subcommands of `megatron-rl`, one module each, in the order in which `--help` shows them.

A module has `add_arguments(parser, name)` and `run(args) -> int`, the exit code; commands may share one (`args.command` says
which it is). It is imported only when its command is called, and imports no torch on its own: `--help` and `--check` answer
at once, also where torch is missing.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Protocol, cast


class Command(Protocol):
    def add_arguments(self, parser: argparse.ArgumentParser, name: str) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


# name: its module in this package, and what it does
COMMANDS = {
    "train": ("run_recipe", "reinforcement learning (after a warm-up by fine-tuning, where sft.steps > 0)"),
    "sft": ("run_recipe", "supervised fine-tuning on demonstrations"),
    "evaluate": ("run_recipe", "score the model on the recipe's held-out tasks"),
    "plan": ("plan", "where the memory of each GPU goes on a number of nodes, and whether the recipe fits"),
    "report": ("report", "one page on a run, or several side by side: findings, curves, times, rollouts"),
}


def load(name: str) -> Command:
    """The module of a command."""
    module, _ = COMMANDS[name]
    return cast(Command, importlib.import_module(f"megatron_rl.commands.{module}"))
