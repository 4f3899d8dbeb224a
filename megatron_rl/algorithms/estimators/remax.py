"""ReMax: the greedy rollout's reward as baseline (Li et al. 2023)."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.groups import Groups
from megatron_rl.algorithms.registry import implements
from megatron_rl.config.methods import ESTIMATOR


@implements(ESTIMATOR, "remax")
def remax(groups: Groups) -> Tensor:
    """A_ij = r_ij - r_i(greedy), both the weighted sum of the columns."""
    greedy = groups.table.greedy
    assert greedy is not None
    return groups.rewards - (greedy.double() * groups.weights).sum(1, keepdim=True)
