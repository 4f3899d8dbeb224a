"""GRPO: the reward's z-score within its group (Eq. 3; GDPO Eq. 2).

Shao et al. 2024, "DeepSeekMath", https://arxiv.org/abs/2402.03300
"""

from __future__ import annotations

from megatron_rl.base.typed_params import NonNegative
from megatron_rl.methods.catalogue import Ddof, Groups, Tensor, advantage_estimator
from megatron_rl.methods.numerics import safe_divide


@advantage_estimator("grpo")
def grpo(groups: Groups, *, ddof: Ddof = 1, eps: NonNegative = 1e-6) -> Tensor:
    """A_ij = (r_ij - mean_i) / (std_i + eps); 0 in a constant group and in a group of one."""
    centred = groups.centred
    return safe_divide(centred.values, groups.std(centred, ddof) + eps)
