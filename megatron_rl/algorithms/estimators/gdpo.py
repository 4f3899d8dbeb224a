"""GDPO: every reward normalised on its own, then weighted, summed and normalised over the batch (GDPO Eq. 4-7)."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.groups import Groups, safe_divide, whiten
from megatron_rl.algorithms.registry import implements
from megatron_rl.config.methods import ESTIMATOR


@implements(ESTIMATOR, "gdpo")
def gdpo(
    groups: Groups,
    *,
    ddof: int,
    eps: float,
    batch_norm: bool,
    batch_ddof: int,
    batch_eps: float,
    batch_eps_mode: str,
    over: str,
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
    std = torch.where(columns.span > 0, groups.columns_std(ddof) + eps, 0.0)
    terms = safe_divide(columns.values, std) * groups.weights
    total, size = terms.sum(2), terms.abs().sum(2)
    # Terms that cancel leave rounding noise, the rewards' own and ours, which the batch norm of an otherwise silent
    # batch would blow up.
    largest = groups.values.abs().amax(1, keepdim=True)
    noise = 4 * groups.unit * (safe_divide(largest, std) * groups.weights.abs()).sum(2)
    silent = (total.abs() <= noise).all(1, keepdim=True)
    total = torch.where(silent | (total.abs() <= 16 * torch.finfo(torch.float64).eps * size), 0.0, total)
    if not batch_norm:
        return total
    counts = groups.table.lengths if over == "tokens" else None
    return whiten(
        total,
        groups.valid,
        counts=counts,
        ddof=batch_ddof,
        eps=batch_eps,
        eps_mode=batch_eps_mode,
        size=size,
    )
