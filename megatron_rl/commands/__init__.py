"""The subcommands of `megatron-rl`, one module each, in the order in which `--help` shows them.

A module has `add_arguments(parser, name)` and `run(args) -> int`, the exit code; a `ConfigError` that it raises has one, too.
Commands may share a module (`args.command` says which it is). It is imported only when its command is called, and imports no
torch on its own: `--help` and `--check` answer at once, also where torch is missing.
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
    "reward-model": ("run_recipe", "a Bradley-Terry reward model on preference pairs"),
    "evaluate": ("evaluate", "a checkpoint, a Hugging Face folder or a served model on held-out tasks"),
    "plan": ("plan", "where the memory of each GPU goes on a number of nodes, and whether the recipe fits"),
    "convert": ("convert", "Hugging Face folders to Megatron checkpoints and back, losing nothing"),
    "launch": ("launch", "runs, chains and sweeps through NeMo-Run: here, or on a Slurm cluster"),
    "sweep": ("sweep", "a training run per line of overrides and seed, here; then what difference the lines made"),
    "migrate": ("migrate", "a configuration of verl, NeMo-RL or TRL as a recipe"),
    "preflight": ("preflight", "whether these machines are fit for the recipe; names the node that is not"),
    "selftest": (
        "selftest",
        "every part of the stack on this node, smallest first, with figures; the first thing to run on a GPU",
    ),
    "status": ("status", "what a run is doing, or why it stopped, and how to continue"),
    "report": ("report", "one page on a run, or several side by side: findings, curves, times, rollouts"),
    "compare": ("compare", "what other estimators and surrogates make of the rollouts that a run recorded"),
    "replay": ("replay", "a recorded step's rewards again, without model, prompts and agents: what differs"),
    "inspect": ("inspect_checkpoint", "what a checkpoint holds, or how two differ"),
    "prove-resume": (
        "prove_resume",
        "whether a run of the recipe that is killed and continued ends as one that is not",
    ),
}


def load(name: str) -> Command:
    module, _ = COMMANDS[name]
    return cast(Command, importlib.import_module(f"megatron_rl.commands.{module}"))
