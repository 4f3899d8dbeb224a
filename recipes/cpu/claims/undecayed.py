"""DGPO without its essential term, for dgpo.yaml."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from megatron_rl.algorithms import REGIONS, bounded_exp, regions, surrogate

if TYPE_CHECKING:
    from torch import Tensor


@surrogate("undecayed")
def undecayed(
    log_ratio: Tensor, advantages: Tensor, *, m: int = 2, eps_low: float = 0.2, eps_high: float = 0.2
) -> Tensor:
    """DGPO (Eq. 9) whose weight does not decay on the left: F stays 1 - eps_low, as GPPO's; the right is DGPO's."""
    region = regions(log_ratio, advantages, eps_low, eps_high)
    right = (1 - 1 / m) * log_ratio + math.log(1 + eps_high) / m
    log_weight = log_ratio.masked_fill(region == REGIONS.index("LN"), math.log(1 - eps_low))
    return bounded_exp(right.where(region == REGIONS.index("HP"), log_weight))
