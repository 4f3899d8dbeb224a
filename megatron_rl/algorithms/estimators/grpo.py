"""GRPO: the reward's z-score within its group (Shao et al. 2024, Eq. 3; GDPO Eq. 2)."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.groups import Groups, safe_divide
from megatron_rl.algorithms.registry import implements
from megatron_rl.config.methods import ESTIMATOR


@implements(ESTIMATOR, "grpo")
def grpo(groups: Groups, *, ddof: int, eps: float) -> Tensor:
    """A_ij = (r_ij - mean_i) / (std_i + eps); 0 in a constant group and in a group of one."""
    centred = groups.centred
    return safe_divide(centred.values, groups.std(centred, ddof) + eps)
