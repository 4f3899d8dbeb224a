"""No clip: plain importance weighting."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.ratios import bounded_exp
from megatron_rl.algorithms.registry import implements
from megatron_rl.config.methods import WEIGHT


@implements(WEIGHT, "none")
def none(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """w."""
    return bounded_exp(log_ratio)
