"""The rewards that an agent gives a conversation."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

from megatron_rl.agents.registry import Verdict
from megatron_rl.data.sample import EVERY_COLUMN

Rewards: TypeAlias = dict[str, float | tuple[float, ...]]
"""By column: a number, NaN where it has no value; or one number per turn."""


def rewards_of(verdict: Verdict) -> Rewards:
    """A verdict by column.

    Raises:
        ValueError: it is neither a number, a list of numbers, nor a mapping of these.
    """
    if verdict is None:
        return {}
    named = dict(verdict) if isinstance(verdict, Mapping) else {"reward": verdict}
    rewards = Rewards()
    for column, value in named.items():
        if isinstance(value, list | tuple) and isinstance(column, str) and column != EVERY_COLUMN:
            rewards[column] = tuple(_number_of_turn(verdict, each) for each in value)
            continue
        number = math.nan if value is None else _float(value)
        if not isinstance(column, str) or column == EVERY_COLUMN or math.isinf(number):
            raise ValueError(f"{verdict!r:.200}, no number or mapping of columns to numbers")
        rewards[column] = number
    return rewards


def _float(value: object) -> float:
    """A number; infinite where it is none, or beyond all floats."""
    with contextlib.suppress(OverflowError):
        return float(value) if isinstance(value, float | int | np.floating | np.integer) else math.inf
    return math.inf


def _number_of_turn(verdict: Verdict, value: object) -> float:
    number = _float(value)
    if not math.isfinite(number):
        raise ValueError(f"{verdict!r:.200}, where a turn's reward is {value!r:.40}, no finite number (0: it has none)")
    return number


def check_turns(rewards: Rewards, turns: int) -> None:
    """ValueError: a list has not one number per turn of the policy."""
    for column, value in rewards.items():
        if isinstance(value, tuple) and len(value) != turns:
            raise ValueError(
                f"{len(value)} rewards of turns in the column {column!r}, and the policy had {turns} turns"
            )


def totals(rewards: Rewards) -> dict[str, float]:
    """A number per column: of turns their rewards' sum, added in their order."""
    return {column: _sum(value) if isinstance(value, tuple) else value for column, value in rewards.items()}


def _sum(values: tuple[float, ...]) -> float:
    total = 0.0
    for value in values:  # `sum` compensates rounding, and would not give what an agent adds up
        total += value
    return total


def of_turns(rewards: Rewards) -> dict[str, tuple[float, ...]]:
    """The columns that have a number per turn."""
    return {column: value for column, value in rewards.items() if isinstance(value, tuple)}
