"""CISPO: the clamped ratio as a constant weight (DGPO paper Eq. 3)."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.ratios import bounded_exp, log_bounds
from megatron_rl.algorithms.registry import implements
from megatron_rl.config.methods import WEIGHT


@implements(WEIGHT, "cispo")
def cispo(log_ratio: Tensor, advantages: Tensor, *, eps_low: float, eps_high: float) -> Tensor:
    """w clamped to [1 - eps_low, 1 + eps_high], for either sign of the advantage."""
    low, high = log_bounds(eps_low, eps_high)
    return bounded_exp(log_ratio.clamp(low, high))
