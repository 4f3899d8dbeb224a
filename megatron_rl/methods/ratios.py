"""Importance ratios in the log domain: the regions of DGPO's Table 1. Importing it loads no torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from megatron_rl.methods.numerics import above, below

if TYPE_CHECKING:
    from torch import Tensor


def log_bounds(eps_low: float, eps_high: float) -> tuple[float, float]:
    """Logarithms of 1 - eps_low and 1 + eps_high."""
    return math.log(1.0 - eps_low), math.log(1.0 + eps_high)


def left_negative(log_ratio: Tensor, advantages: Tensor, eps_low: float) -> Tensor:
    """LN: w < 1 - eps_low and A < 0."""
    return below(log_ratio, math.log(1.0 - eps_low)) & (advantages < 0)


def high_positive(log_ratio: Tensor, advantages: Tensor, eps_high: float) -> Tensor:
    """HP: w > 1 + eps_high and A > 0."""
    return above(log_ratio, math.log(1.0 + eps_high)) & (advantages > 0)


REGIONS = ("M", "LN", "HP", "LP", "HN")


def regions(log_ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """Index into `REGIONS` for every token, int64, same shape. A = 0 is always M."""
    low, high = log_bounds(eps_low, eps_high)
    is_low, is_high = below(log_ratio, low), above(log_ratio, high)
    positive, negative = advantages > 0, advantages < 0
    code = is_low.long() * 0
    for index, where in enumerate((is_low & negative, is_high & positive, is_low & positive, is_high & negative), 1):
        code = code.masked_fill(where, index)
    return code
