"""Correction of the mismatch between the trainer's and the engine's log-probs of the same tokens.

The ratio is pi_train(old) / pi_rollout, of tokens that the engine drew. One importance weight (truncated), and any
number of filters that drop tokens or whole rollouts. Both depend on old quantities only, so the mask, and with it the
loss's denominators, is known before the update begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.algorithms.aggregation import sequence_sizes
from megatron_rl.algorithms.metrics import Metrics
from megatron_rl.config.algorithm import CorrectionFilterConfig
from megatron_rl.methods.numerics import bounded_exp


class Correction(NamedTuple):
    """Importance weights and mask of a micro-batch."""

    weights: Tensor | None  # float32 or float64 [tokens], factor of each token's loss; None without a weight
    mask: Tensor  # bool [tokens], what is left of the given mask


def sequence_log_ratio(log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor, mean: bool) -> Tensor:
    """Each rollout's log-ratio, summed or averaged over its live tokens, on every one of its tokens: [tokens]."""
    return _per_rollout(log_ratio, mask, sequence_ids, mean)[sequence_ids]


def _per_rollout(values: Tensor, mask: Tensor, sequence_ids: Tensor, mean: bool) -> Tensor:
    sizes = sequence_sizes(mask, sequence_ids)
    live = torch.where(mask, values, 0.0)
    total = torch.zeros(len(sizes), dtype=live.dtype, device=live.device).index_add_(0, sequence_ids, live)
    return total / sizes.clamp(min=1).to(live.dtype) if mean else total


def correct(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    weight: str = "none",
    cap: float = 2.0,
    filters: Sequence[CorrectionFilterConfig] = (),
) -> Correction:
    """Importance weights and the mask that the filters leave.

    Args:
        old_log_probs: the trainer's log-probs before the update, [tokens].
        rollout_log_probs: the engine's, [tokens].
        mask: bool [tokens].
        sequence_ids: int64 [tokens]; whole rollouts only.
        weight: `none`, or what one weight covers: `token`, `geometric` (mean log-ratio of the rollout), `sequence`
            (sum).
        cap: weights above are cut to it.
        filters: all are judged on the given mask; a token stays where it passes every one.
    """
    mask = mask.bool()
    precise = torch.promote_types(old_log_probs.dtype, torch.float32)
    log_ratio = torch.where(mask, (old_log_probs.to(precise) - rollout_log_probs.to(precise)).detach(), 0.0)
    levels = {"token": log_ratio}
    for level, mean in (("geometric", True), ("sequence", False)):
        if weight == level or any(each.level == level and each.by == "ratio" for each in filters):
            levels[level] = sequence_log_ratio(log_ratio, mask, sequence_ids, mean)
    weights = None if weight == "none" else bounded_exp(levels[weight]).clamp(max=cap)
    keep = mask
    for each in filters:
        if each.by == "ratio":
            statistic = bounded_exp(levels[each.level])
        else:
            statistic = _divergence(log_ratio, each.by)
            if each.level != "token":
                statistic = sequence_log_ratio(statistic, mask, sequence_ids, mean=each.level == "geometric")
        if each.low is not None:
            keep = keep & (statistic >= each.low)
        if each.high is not None:
            keep = keep & (statistic <= each.high)
    return Correction(weights, keep)


def _divergence(log_ratio: Tensor, by: str) -> Tensor:
    """KL(rollout || train) of tokens drawn by the engine, from log_ratio = log train - log rollout."""
    if by == "k1":
        return -log_ratio
    if by == "k2":
        return log_ratio.square() / 2
    return bounded_exp(log_ratio) - 1 - log_ratio


# First tokens of the parts of a response whose mismatch is reported apart: rounding may add up along it.
POSITIONS = (0, 16, 64, 256, 1024, 4096, 16384)


def _positions(sequence_ids: Tensor) -> Tensor:
    """Each token's place among those of its rollout, which come in order: int64 [tokens]."""
    order = torch.argsort(sequence_ids, stable=True)
    sizes = sequence_sizes(torch.ones_like(sequence_ids, dtype=torch.bool), sequence_ids)
    starts = (sizes.cumsum(0) - sizes).long()[sequence_ids[order]]
    return torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device) - starts)


def correction_metrics(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    correction: Correction,
    cap: float,
) -> Metrics:
    """The usual gauges of the mismatch, over the given mask (before filters)."""
    mask = mask.bool()
    metrics = Metrics()
    log_ratio = torch.where(mask, (old_log_probs.double() - rollout_log_probs.double()).detach(), 0.0)
    for name in ("k1", "k3"):
        metrics.mean(f"mismatch/kl_{name}", _divergence(log_ratio, name), mask)
    metrics.mean("mismatch/abs_log_ratio", log_ratio.abs(), mask)
    metrics.maximum("mismatch/abs_log_ratio_max", log_ratio.abs(), mask)
    bounds = torch.tensor(POSITIONS[1:], device=mask.device)
    parts = torch.bucketize(_positions(sequence_ids), bounds, right=True)
    sums, counts = (
        torch.zeros(len(POSITIONS), dtype=torch.float64, device=mask.device).index_add_(0, parts, each)
        for each in (log_ratio.abs(), mask.double())
    )
    for first, total, count in zip(POSITIONS, sums, counts, strict=True):
        metrics.total(f"mismatch/abs_log_ratio_from_{first}", total, count)
    per_rollout = _per_rollout(-log_ratio, mask, sequence_ids, mean=True)
    seen = sequence_sizes(mask, sequence_ids) > 0
    metrics.mean("mismatch/log_perplexity_gap", per_rollout, seen)  # log PPL(train) - log PPL(rollout)
    metrics.mean("correction/dropped_share", (mask & ~correction.mask).double(), mask)
    if correction.weights is not None:
        weights = correction.weights
        at_cap = weights >= weights.new_tensor(cap)  # the cap as it was cut to: rounded to the weights' precision
        metrics.mean("correction/weight", weights, correction.mask)
        metrics.mean("correction/weight_squared", weights.double().square(), correction.mask)
        metrics.mean("correction/truncated_share", at_cap.double(), correction.mask)
    return metrics
