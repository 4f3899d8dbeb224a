"""No clip: plain importance weighting."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_rl.methods.catalogue import gradient_weight
from megatron_rl.methods.numerics import bounded_exp

if TYPE_CHECKING:
    from torch import Tensor


@gradient_weight("none")
def none(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """w."""
    return bounded_exp(log_ratio)
