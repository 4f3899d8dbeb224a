"""RLOO: the mean of the group's other rollouts as baseline.

Ahmadian et al. 2024, "Back to Basics", https://arxiv.org/abs/2402.14740
"""

from __future__ import annotations

from megatron_rl.methods.catalogue import Groups, Tensor, advantage_estimator


@advantage_estimator("rloo")
def rloo(groups: Groups) -> Tensor:
    """A_ij = r_ij - mean of the others = (r_ij - mean_i) m_i / (m_i - 1); 0 for a group of one."""
    return groups.centred.values * (groups.count / (groups.count - 1).clamp(min=1))[:, None]
