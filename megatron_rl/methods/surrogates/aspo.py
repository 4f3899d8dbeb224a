"""ASPO: the reversed ratio for positive advantages (section A.3.3 of the DGPO paper).

Wang et al. 2025, "ASPO", https://arxiv.org/abs/2510.06062
"""

from __future__ import annotations

import math

from megatron_rl.base.typed_params import NonNegative, Positive
from megatron_rl.methods.catalogue import EpsLow, Tensor, surrogate
from megatron_rl.methods.numerics import above, below, bounded_exp


@surrogate("aspo")
def aspo(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    cap_pos: Positive = 3.0,
    cap_neg: Positive = 3.0,
    eps_low: EpsLow = 0.2,
    eps_high: NonNegative = 0.2,
) -> Tensor:
    """A > 0: min(1 / w, cap_pos), 0 in HP. A < 0: min(w, cap_neg), 0 in LN. Eq. 6 of the DGPO paper reverses both."""
    positive = bounded_exp((-log_ratio).clamp(max=math.log(cap_pos)))
    positive = positive.masked_fill(above(log_ratio, math.log(1 + eps_high)), 0.0)
    negative = bounded_exp(log_ratio.clamp(max=math.log(cap_neg)))
    negative = negative.masked_fill(below(log_ratio, math.log(1 - eps_low)), 0.0)
    return negative.where(advantages < 0, positive)
