"""PPO's clip, with asymmetric bounds (DAPO's clip-higher) and optional dual clip (DGPO paper Eq. 2; Ye et al. 2020)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_rl.algorithms.ratios import above, bounded_exp, high_positive, left_negative
from megatron_rl.algorithms.registry import implements
from megatron_rl.config.methods import WEIGHT


@implements(WEIGHT, "clip")
def clip(log_ratio: Tensor, advantages: Tensor, *, eps_low: float, eps_high: float, dual_clip: float | None) -> Tensor:
    """w, but 0 in LN and HP; with `dual_clip` c also where A < 0 and w > c, where the objective is held at c A."""
    stop = left_negative(log_ratio, advantages, eps_low) | high_positive(log_ratio, advantages, eps_high)
    if dual_clip is not None:
        stop = stop | (above(log_ratio, math.log(dual_clip)) & (advantages < 0))
    return torch.where(stop, 0.0, bounded_exp(log_ratio))
