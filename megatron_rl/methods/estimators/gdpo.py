"""GDPO: every reward normalised on its own, then weighted, summed and normalised over the batch (Eq. 4-7).

Liu et al. 2026, "GDPO", https://arxiv.org/abs/2601.05242
"""

from __future__ import annotations

from megatron_rl.base.typed_params import NonNegative
from megatron_rl.methods.catalogue import Ddof, EpsMode, Groups, Needs, Over, Tensor, advantage_estimator
from megatron_rl.methods.numerics import safe_divide


@advantage_estimator("gdpo", needs=lambda params: Needs(lengths=params["batch_norm"] and params["over"] == "tokens"))
def gdpo(
    groups: Groups,
    *,
    ddof: Ddof = 1,
    eps: NonNegative = 0.0,
    batch_norm: bool = True,
    batch_ddof: Ddof = 1,
    batch_eps: NonNegative = 1e-8,
    batch_eps_mode: EpsMode = "std_add",
    over: Over = "sequences",
) -> Tensor:
    """A_ij = sum_k w_k (r_ijk - mean_ik) / (std_ik + eps), then (A - batch mean) / (batch std + batch_eps).

    A reward without a value for a rollout gives it no term, and its mean and std are over the others.

    Args:
        ddof, eps: of Eq. 4, which has no eps; a constant reward contributes exactly 0.
        batch_norm: Eq. 6. With it only the ratios of the weights matter (Eq. 7).
        batch_ddof, batch_eps, batch_eps_mode: of Eq. 6.
        over: Eq. 6 counts sequences; `tokens` counts each as often as its response has tokens.
    """
    columns = groups.columns
    std = (groups.columns_std(ddof) + eps).where(columns.span > 0, 0.0)
    total, size = groups.sum_normalised(safe_divide(columns.values, std) * groups.weights, std)
    if not batch_norm:
        return total
    return groups.whiten(total, over, ddof=batch_ddof, eps=batch_eps, eps_mode=batch_eps_mode, size=size)
