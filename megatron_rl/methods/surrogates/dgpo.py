"""DGPO: beyond the bounds the weight of the probability gradient decays on both sides (Eq. 9).

Fu et al. 2026, "From log pi to pi", https://arxiv.org/abs/2603.14389
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from megatron_rl.base.typed_params import NonNegative
from megatron_rl.methods.catalogue import EpsLow, Tensor, surrogate
from megatron_rl.methods.numerics import bounded_exp
from megatron_rl.methods.ratios import high_positive, left_negative

Exponent = Annotated[int, Field(ge=1)]


@surrogate("dgpo")
def dgpo(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    n: Exponent = 1,
    m: Exponent = 2,
    eps_low: EpsLow = 0.2,
    eps_high: NonNegative = 0.2,
) -> Tensor:
    """w; w^(n+1) / (1 - eps_low)^n in LN; (1 + eps_high)^(1/m) w^(1 - 1/m) in HP. F = W pi, W of Eq. 9.

    The exponent is chosen before the exponential, so no branch that is not taken can overflow.
    """
    left = (n + 1) * log_ratio - n * math.log(1 - eps_low)
    right = (1 - 1 / m) * log_ratio + math.log(1 + eps_high) / m
    log_weight = left.where(left_negative(log_ratio, advantages, eps_low), log_ratio)
    return bounded_exp(right.where(high_positive(log_ratio, advantages, eps_high), log_weight))
