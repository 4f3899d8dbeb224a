"""GPPO: beyond the bounds the gradient continues with the bound's weight (Eq. 4 of the DGPO paper).

Su et al. 2025, "Klear-Reasoner", https://arxiv.org/abs/2508.07629
"""

from __future__ import annotations

from megatron_rl.base.typed_params import NonNegative
from megatron_rl.methods.catalogue import EpsLow, Tensor, surrogate
from megatron_rl.methods.surrogates.ce_gppo import ce_gppo


@surrogate("gppo")
def gppo(log_ratio: Tensor, advantages: Tensor, *, eps_low: EpsLow = 0.2, eps_high: NonNegative = 0.2) -> Tensor:
    """w; 1 - eps_low in LN; 1 + eps_high in HP."""
    return ce_gppo(log_ratio, advantages, beta1=1.0, beta2=1.0, eps_low=eps_low, eps_high=eps_high)
