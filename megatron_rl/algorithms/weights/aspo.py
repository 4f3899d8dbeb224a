"""ASPO: the reversed ratio for positive advantages (DGPO paper, section A.3.3; Wang et al. 2025)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_rl.algorithms.ratios import above, below, bounded_exp
from megatron_rl.algorithms.registry import implements
from megatron_rl.config.methods import WEIGHT


@implements(WEIGHT, "aspo")
def aspo(
    log_ratio: Tensor, advantages: Tensor, *, cap_pos: float, cap_neg: float, eps_low: float, eps_high: float
) -> Tensor:
    """A > 0: min(1 / w, cap_pos), 0 in HP. A < 0: min(w, cap_neg), 0 in LN. Eq. 6 of the DGPO paper reverses both."""
    positive = torch.where(
        above(log_ratio, math.log(1 + eps_high)), 0.0, bounded_exp((-log_ratio).clamp(max=math.log(cap_pos)))
    )
    negative = torch.where(
        below(log_ratio, math.log(1 - eps_low)), 0.0, bounded_exp(log_ratio.clamp(max=math.log(cap_neg)))
    )
    return torch.where(advantages < 0, negative, positive)
