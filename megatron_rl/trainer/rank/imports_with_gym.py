"""As `trainer.rank.imports`, and reasoning_gym, which is as much again as a tenth of them: for recipes with tasks of its."""

from __future__ import annotations

from megatron_rl.seams import reasoning_gym
from megatron_rl.trainer.rank import imports


def import_all() -> None:
    """Imports what `imports.import_all` does, and reasoning_gym."""
    imports.import_all()
    reasoning_gym.load()
