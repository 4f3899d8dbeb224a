"""REINFORCE++-Baseline: the group mean as baseline, then whitened over the whole batch (Hu 2025)."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.groups import Groups, whiten
from megatron_rl.algorithms.registry import implements
from megatron_rl.config.methods import ESTIMATOR


@implements(ESTIMATOR, "reinforce_pp_baseline")
def reinforce_pp_baseline(
    groups: Groups, *, normalize: bool, ddof: int, eps: float, eps_mode: str, over: str
) -> Tensor:
    """A_ij = whitened (r_ij - mean_i). Over tokens the batch mean is not 0, and is subtracted too."""
    counts = groups.table.lengths if over == "tokens" else None
    return whiten(
        groups.centred.values,
        groups.valid,
        counts=counts,
        ddof=ddof,
        eps=eps,
        eps_mode=eps_mode,
        normalize=normalize,
    )
