"""BLOO: the mean of the other prompts as baseline (section 4.5 and Eq. 10, right, of the shrinkage paper).

Zeng et al. 2025, "Shrinking the Variance", https://arxiv.org/abs/2511.03710
"""

from __future__ import annotations

from megatron_rl.methods.catalogue import Groups, Tensor, advantage_estimator


@advantage_estimator("bloo", prompts=2)
def bloo(groups: Groups) -> Tensor:
    """A_ij = r_ij - mean over the other prompts k of mean_k."""
    mean, _ = groups.means
    others = groups.leave_one_out(mean, mean).mean
    return groups.centred.values + (mean - others)[:, None]
