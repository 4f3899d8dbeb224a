"""Dr. GRPO: the group mean as baseline, without the division by the standard deviation.

Liu et al. 2025, "Understanding R1-Zero-Like Training", https://arxiv.org/abs/2503.20783
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_rl.methods.catalogue import advantage_estimator

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_rl.methods.groups import Groups


@advantage_estimator("dr_grpo")
def dr_grpo(groups: Groups) -> Tensor:
    """A_ij = r_ij - mean_i."""
    return groups.centred.values
