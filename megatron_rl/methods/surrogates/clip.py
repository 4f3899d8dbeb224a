"""PPO's clip (Eq. 2 of the DGPO paper), with asymmetric bounds and optional dual clip.

Schulman et al. 2017, "PPO", https://arxiv.org/abs/1707.06347; asymmetric bounds: Yu et al. 2025, "DAPO",
https://arxiv.org/abs/2503.14476; dual clip: Ye et al., "Mastering Complex Control in MOBA Games with Deep Reinforcement
Learning", AAAI 2020.
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from megatron_rl.base.typed_params import NonNegative
from megatron_rl.methods.catalogue import EpsLow, Tensor, surrogate
from megatron_rl.methods.numerics import above, bounded_exp
from megatron_rl.methods.ratios import high_positive, left_negative


def ppo_objective(
    log_ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> Tensor:
    """min(w A, clip(w, 1 - eps_low, 1 + eps_high) A) per token; with dual_clip c at least c A where A < 0.

    Eq. 25 of AWPO, 3 of GDPO.
    """
    ratio = bounded_exp(log_ratio)
    value = (ratio * advantages).minimum(ratio.clamp(1 - eps_low, 1 + eps_high) * advantages)
    if dual_clip is not None:
        value = value.maximum(dual_clip * advantages).where(advantages < 0, value)
    return value


@surrogate("clip", objective=ppo_objective)
def clip(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    eps_low: EpsLow = 0.2,
    eps_high: NonNegative = 0.2,
    dual_clip: Annotated[float, Field(gt=1)] | None = None,
) -> Tensor:
    """w, but 0 in LN and HP; with `dual_clip` c also where A < 0 and w > c, where the objective is held at c A."""
    stop = left_negative(log_ratio, advantages, eps_low) | high_positive(log_ratio, advantages, eps_high)
    if dual_clip is not None:
        stop = stop | (above(log_ratio, math.log(dual_clip)) & (advantages < 0))
    return bounded_exp(log_ratio).masked_fill(stop, 0.0)
