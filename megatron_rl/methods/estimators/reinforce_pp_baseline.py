"""REINFORCE++-Baseline: the group mean as baseline, then whitened over the whole batch.

Hu 2025, "REINFORCE++", https://arxiv.org/abs/2501.03262
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_rl.methods.catalogue import Ddof, EpsMode, Needs, Over, advantage_estimator
from megatron_rl.parameters import NonNegative

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_rl.methods.groups import Groups


@advantage_estimator("reinforce_pp_baseline", needs=lambda params: Needs(lengths=params["over"] == "tokens"))
def reinforce_pp_baseline(
    groups: Groups,
    *,
    normalize: bool = True,
    ddof: Ddof = 1,
    eps: NonNegative = 1e-8,
    eps_mode: EpsMode = "var_add",
    over: Over = "sequences",
) -> Tensor:
    """A_ij = whitened (r_ij - mean_i). Over tokens the batch mean is not 0, and is subtracted too."""
    return groups.whiten(groups.centred.values, over, normalize=normalize, ddof=ddof, eps=eps, eps_mode=eps_mode)
