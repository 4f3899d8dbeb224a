"""ReMax: the greedy rollout's reward as baseline.

Li et al. 2023, "ReMax", https://arxiv.org/abs/2310.10505
"""

from __future__ import annotations

from megatron_rl.methods.catalogue import Groups, Tensor, advantage_estimator


@advantage_estimator("remax", greedy=True)
def remax(groups: Groups) -> Tensor:
    """A_ij = r_ij - r_i(greedy), both the weighted sum of the columns."""
    greedy = groups.table.greedy
    assert greedy is not None
    return groups.rewards - (greedy.double() * groups.weights).sum(1, keepdim=True)
