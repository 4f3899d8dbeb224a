"""A command's message to its ranks: made by the launcher, read by each rank from its command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

MODULE = "megatron_rl.trainer.rank.main"


@dataclass(frozen=True)
class RankJob:
    """`recipe`: a file with the resolved recipe. `resume`: `auto`, `never`, or a checkpoint's folder."""

    command: str  # train, sft, reward-model or evaluate
    run_dir: str
    recipe: str
    resume: str = "auto"

    def words(self) -> list[str]:
        """The command line of a rank."""
        options = ("--run-dir", self.run_dir, "--recipe", self.recipe, "--resume", self.resume)
        return [sys.executable, "-m", MODULE, self.command, *options]

    @classmethod
    def parse(cls, arguments: Sequence[str] | None = None) -> RankJob:
        """Reads a rank's command line, as `words` writes it."""
        parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
        parser.add_argument("command", choices=("train", "sft", "reward-model", "evaluate"))
        parser.add_argument("--run-dir", required=True)
        parser.add_argument("--recipe", required=True, metavar="FILE", help="the resolved recipe")
        parser.add_argument("--resume", default="auto")
        return cls(**vars(parser.parse_args(arguments)))
