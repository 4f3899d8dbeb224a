"""RLOO: the mean of the group's other rollouts as baseline (Ahmadian et al. 2024)."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.groups import Groups
from megatron_rl.algorithms.registry import implements
from megatron_rl.config.methods import ESTIMATOR


def leave_one_out_advantages(groups: Groups) -> Tensor:
    """r_ij - mean of the others = (r_ij - mean_i) m_i / (m_i - 1), float64 [n, m]; 0 for a group of one."""
    return groups.centred.values * (groups.count / (groups.count - 1).clamp(min=1))[:, None]


@implements(ESTIMATOR, "rloo")
def rloo(groups: Groups) -> Tensor:
    return leave_one_out_advantages(groups)
