"""GPPO: beyond the bounds the gradient goes on with the bound's weight (DGPO paper Eq. 4)."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.registry import implements
from megatron_rl.algorithms.weights.ce_gppo import ce_gppo
from megatron_rl.config.methods import WEIGHT


@implements(WEIGHT, "gppo")
def gppo(log_ratio: Tensor, advantages: Tensor, *, eps_low: float, eps_high: float) -> Tensor:
    """w; 1 - eps_low in LN; 1 + eps_high in HP."""
    return ce_gppo(log_ratio, advantages, beta1=1.0, beta2=1.0, eps_low=eps_low, eps_high=eps_high)
