"""Dr. GRPO: the group mean as baseline, without the division by the standard deviation.

Liu et al. 2025, "Understanding R1-Zero-Like Training", https://arxiv.org/abs/2503.20783
"""

from __future__ import annotations

from megatron_rl.methods.catalogue import Groups, Tensor, advantage_estimator


@advantage_estimator("dr_grpo")
def dr_grpo(groups: Groups) -> Tensor:
    """A_ij = r_ij - mean_i."""
    return groups.centred.values
