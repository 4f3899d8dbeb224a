"""BLOO: the mean of the other prompts' means as baseline (shrinkage paper, section 4.5; Eq. 10, right)."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.groups import Groups, leave_one_out
from megatron_rl.algorithms.registry import implements
from megatron_rl.config.methods import ESTIMATOR


@implements(ESTIMATOR, "bloo")
def bloo(groups: Groups) -> Tensor:
    """A_ij = r_ij - mean over the other prompts k of mean_k."""
    mean, _ = groups.means
    others = leave_one_out(mean, mean, groups.present).mean
    return groups.centred.values + (mean - others)[:, None]
