"""DGPO: beyond the bounds the weight of the probability gradient decays on both sides (DGPO Eq. 9)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_rl.algorithms.ratios import bounded_exp, high_positive, left_negative
from megatron_rl.algorithms.registry import implements
from megatron_rl.config.methods import WEIGHT


@implements(WEIGHT, "dgpo")
def dgpo(log_ratio: Tensor, advantages: Tensor, *, n: int, m: int, eps_low: float, eps_high: float) -> Tensor:
    """w; w^(n+1) / (1 - eps_low)^n in LN; (1 + eps_high)^(1/m) w^(1 - 1/m) in HP. F = W pi, W of Eq. 9.

    The exponent is chosen before the exponential, so no branch that is not taken can overflow.
    """
    left = (n + 1) * log_ratio - n * math.log(1 - eps_low)
    right = (1 - 1 / m) * log_ratio + math.log(1 + eps_high) / m
    log_weight = torch.where(left_negative(log_ratio, advantages, eps_low), left, log_ratio)
    return bounded_exp(torch.where(high_positive(log_ratio, advantages, eps_high), right, log_weight))
