"""The subcommands of `megatron-rl`, one module each, in the order in which `--help` shows them.

A module has `add_arguments(parser, name)` and `run(args) -> int`, the exit code; commands may share one (`args.command` says
which it is). None imports torch when it is imported: `--help` and `--check` answer at once, also where torch is missing.
"""

from __future__ import annotations

import argparse
from typing import Protocol

from megatron_rl.commands import run_recipe


class Command(Protocol):
    def add_arguments(self, parser: argparse.ArgumentParser, name: str) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


COMMANDS: dict[str, tuple[str, Command]] = {
    "train": ("reinforcement learning (after a warm-up by fine-tuning, where sft.steps > 0)", run_recipe),
    "sft": ("supervised fine-tuning on demonstrations", run_recipe),
    "evaluate": ("score the model on the recipe's held-out tasks", run_recipe),
}
