"""No clip: plain importance weighting."""

from __future__ import annotations

from megatron_rl.methods.catalogue import Tensor, surrogate
from megatron_rl.methods.numerics import bounded_exp


@surrogate("none")
def none(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """w."""
    return bounded_exp(log_ratio)
