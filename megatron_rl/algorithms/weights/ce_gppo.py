"""CE-GPPO: GPPO with the weights beyond the bounds scaled (DGPO paper Eq. 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.ratios import bounded_exp, high_positive, left_negative
from megatron_rl.algorithms.registry import implements
from megatron_rl.config.methods import WEIGHT


@implements(WEIGHT, "ce_gppo")
def ce_gppo(
    log_ratio: Tensor, advantages: Tensor, *, beta1: float, beta2: float, eps_low: float, eps_high: float
) -> Tensor:
    """w; beta1 (1 - eps_low) in LN; beta2 (1 + eps_high) in HP."""
    weight = bounded_exp(log_ratio)
    weight = torch.where(left_negative(log_ratio, advantages, eps_low), beta1 * (1 - eps_low), weight)
    return torch.where(high_positive(log_ratio, advantages, eps_high), beta2 * (1 + eps_high), weight)
