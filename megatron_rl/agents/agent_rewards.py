"""The rewards that an agent gives a conversation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import numpy as np

from megatron_rl.agents.registry import Verdict
from megatron_rl.data.sample import EVERY_COLUMN


def rewards_of(verdict: Verdict) -> dict[str, float]:
    """A verdict by column; NaN: without a value.

    Raises:
        ValueError: it is neither a number nor a mapping of numbers.
    """
    if verdict is None:
        return {}
    named = dict(verdict) if isinstance(verdict, Mapping) else {"reward": verdict}
    rewards = dict[str, float]()
    for column, value in named.items():
        number: object = math.nan if value is None else value
        is_number = isinstance(number, float | int | np.number) and not math.isinf(number)
        if not isinstance(column, str) or column == EVERY_COLUMN or not is_number:
            raise ValueError(f"{verdict!r:.200}, no number or mapping of columns to numbers")
        rewards[column] = float(cast(float, number))
    return rewards
