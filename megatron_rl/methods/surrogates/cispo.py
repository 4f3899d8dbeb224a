"""CISPO: the clamped ratio as a constant weight (Eq. 3 of the DGPO paper).

Chen et al. 2025, "MiniMax-M1", https://arxiv.org/abs/2506.13585
"""

from __future__ import annotations

from megatron_rl.base.typed_params import NonNegative
from megatron_rl.methods.catalogue import EpsLow, Tensor, surrogate
from megatron_rl.methods.numerics import bounded_exp
from megatron_rl.methods.ratios import log_bounds


@surrogate("cispo")
def cispo(log_ratio: Tensor, advantages: Tensor, *, eps_low: EpsLow = 0.2, eps_high: NonNegative = 0.2) -> Tensor:
    """w clamped to [1 - eps_low, 1 + eps_high], for either sign of the advantage."""
    low, high = log_bounds(eps_low, eps_high)
    return bounded_exp(log_ratio.clamp(low, high))
