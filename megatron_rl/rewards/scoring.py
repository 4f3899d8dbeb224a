"""A recipe's `rewards` section: checked, and used for a single call."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_rl.config.schema import RewardConfig
from megatron_rl.names import unknown_name
from megatron_rl.rewards.registry import make_reward
from megatron_rl.rewards.scorer import Scorer, columns_of

if TYPE_CHECKING:
    from megatron_rl.data import Sample


def check_rewards(rewards: Mapping[str, RewardConfig], tasks: Collection[str] | None = None) -> None:
    """Check names and parameters of all rewards by making them; no process is started and nothing heavy imported.

    Args:
        rewards: the recipe's section, by column name.
        tasks: the recipe's task names, to check `tasks` restrictions against; None: not checked.

    Raises:
        ValueError: naming the key and the nearest known name.
    """
    columns: dict[str, str] = {}  # of every reward, and which reward has it
    for name, config in rewards.items():
        try:
            reward = make_reward(config.reward, **config.params)
        except ValueError as error:
            raise ValueError(f"rewards.{name}: {error}") from error
        columns |= dict.fromkeys(columns_of(name, reward), name)
        if not math.isfinite(config.weight):
            raise ValueError(f"rewards.{name}.weight = {config.weight}, must be a finite number")
        for task in config.tasks or ():
            if tasks is not None and task not in tasks:
                raise ValueError(f"rewards.{name}.tasks: {unknown_name('task', task, tasks)}")
    for name, config in rewards.items():
        if config.condition is None:
            continue
        key, other = f"rewards.{name}.condition", config.condition.column
        if other not in columns:
            raise ValueError(f"{key}.column: {unknown_name('reward column', other, columns)}")
        if columns[other] == name:
            raise ValueError(f"{key}.column = {other!r}: a reward cannot depend on itself")
        if rewards[columns[other]].when_needed and not config.when_needed:
            raise ValueError(f"{key}.column = {other!r}: that column is not always computed; drop its when_needed")
        if not math.isfinite(config.condition.at_least):
            raise ValueError(f"{key}.at_least = {config.condition.at_least}, must be a finite number")


def score_rollouts(
    completions: Sequence[str],
    samples: Sequence[Sample],
    rewards: Mapping[str, RewardConfig],
    needed: Collection[str] = (),
    finish_reasons: Sequence[str] | None = None,
    num_tokens: Sequence[int] | None = None,
) -> list[dict[str, float]]:
    """`Scorer(rewards, needed).score(...)`, for a single call. A run keeps one `Scorer`: its helpers stay warm."""
    return Scorer(rewards, needed).score(completions, samples, finish_reasons, num_tokens)
