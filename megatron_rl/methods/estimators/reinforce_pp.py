"""REINFORCE++: the reward whitened over the whole batch; and its variant with the group mean as baseline.

Hu 2025, "REINFORCE++", https://arxiv.org/abs/2501.03262
"""

from __future__ import annotations

from megatron_rl.base.typed_params import NonNegative
from megatron_rl.methods.catalogue import Ddof, EpsMode, Groups, Needs, Over, Tensor, advantage_estimator


@advantage_estimator("reinforce_pp", needs=lambda params: Needs(lengths=params["over"] == "tokens"))
def reinforce_pp(
    groups: Groups,
    *,
    normalize: bool = True,
    ddof: Ddof = 1,
    eps: NonNegative = 1e-8,
    eps_mode: EpsMode = "var_add",
    over: Over = "sequences",
) -> Tensor:
    """A_ij = (r_ij - mean) / std over the batch's sequences, or over its tokens: each reward once per token."""
    rewards, size = groups.weighted()
    return groups.whiten(
        rewards, over, normalize=normalize, ddof=ddof, eps=eps, eps_mode=eps_mode, unit=groups.unit, size=size
    )


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
