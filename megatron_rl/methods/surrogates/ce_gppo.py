"""CE-GPPO: GPPO with the weights beyond the bounds scaled (Eq. 5 of the DGPO paper).

Su et al. 2025, "CE-GPPO", https://arxiv.org/abs/2509.20712
"""

from __future__ import annotations

from megatron_rl.base.typed_params import NonNegative
from megatron_rl.methods.catalogue import EpsLow, Tensor, surrogate
from megatron_rl.methods.numerics import bounded_exp
from megatron_rl.methods.ratios import high_positive, left_negative


@surrogate("ce_gppo")
def ce_gppo(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    beta1: NonNegative = 0.75,
    beta2: NonNegative = 1.0,
    eps_low: EpsLow = 0.2,
    eps_high: NonNegative = 0.2,
) -> Tensor:
    """w; beta1 (1 - eps_low) in LN; beta2 (1 + eps_high) in HP."""
    weight = bounded_exp(log_ratio)
    weight = weight.masked_fill(left_negative(log_ratio, advantages, eps_low), beta1 * (1 - eps_low))
    return weight.masked_fill(high_positive(log_ratio, advantages, eps_high), beta2 * (1 + eps_high))
