"""REINFORCE++: the reward whitened over the whole batch (Hu 2025)."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.groups import Groups, whiten
from megatron_rl.algorithms.registry import implements
from megatron_rl.config.methods import ESTIMATOR


@implements(ESTIMATOR, "reinforce_pp")
def reinforce_pp(groups: Groups, *, normalize: bool, ddof: int, eps: float, eps_mode: str, over: str) -> Tensor:
    """A_ij = (r_ij - mean) / std over the batch's sequences, or over its tokens: each reward once per token."""
    rewards, size = groups.weighted()
    counts = groups.table.lengths if over == "tokens" else None
    return whiten(
        rewards,
        groups.valid,
        counts=counts,
        ddof=ddof,
        eps=eps,
        eps_mode=eps_mode,
        normalize=normalize,
        unit=groups.unit,
        size=size,
    )
