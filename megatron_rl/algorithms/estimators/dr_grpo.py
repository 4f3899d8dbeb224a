"""Dr. GRPO: the group mean as baseline, without the division by the standard deviation (Liu et al. 2025)."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.groups import Groups
from megatron_rl.algorithms.registry import implements
from megatron_rl.config.methods import ESTIMATOR


@implements(ESTIMATOR, "dr_grpo")
def dr_grpo(groups: Groups) -> Tensor:
    """A_ij = r_ij - mean_i."""
    return groups.centred.values
