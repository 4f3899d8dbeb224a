"""What every estimator and gradient weight makes of the same rollouts: numbers to set side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms.correction import sequence_log_ratio
from megatron_rl.algorithms.diagnostics import count_advantage_groups
from megatron_rl.algorithms.groups import Groups
from megatron_rl.algorithms.ratios import REGIONS, regions
from megatron_rl.algorithms.registry import make_advantage_estimator, make_gradient_weight
from megatron_rl.config.methods import RATIOS, check_choice, unmet_needs
from megatron_rl.data import RewardTable


@dataclass
class AdvantageSummary:
    """Of one estimator's advantages of one step.

    Attributes:
        advantages: float64 [n, m].
        spread: standard deviation over all rollouts.
        largest: largest |A|.
        silent: share of groups whose advantages are all 0.
        groups: different groups of advantages (GDPO Fig. 3).
        noise: mean(A^2 tokens) / signal^2, where signal is the mean over groups of the covariance of A and the summed reward.
            A proxy of the gradient's relative variance that does not depend on the advantages' scale: it takes the
            squared norm of a rollout's score to be proportional to its length. None where there is no signal.
        metrics: the estimator's own.
    """

    advantages: Tensor
    spread: float
    largest: float
    silent: float
    groups: int
    noise: float | None
    metrics: dict[str, float] = field(default_factory=dict)


def summarize_advantages(
    table: RewardTable, advantages: Tensor, metrics: Mapping[str, float] | None = None
) -> AdvantageSummary:
    """See `AdvantageSummary`; `advantages` is [n, m]."""
    groups, valid = Groups(table), table.mask
    advantages = advantages.double()
    seen = advantages[valid]
    scale = groups.count / (groups.count - 1).clamp(min=1)
    own = torch.where(valid, advantages, 0.0)
    covariance = (own * groups.centred.values).sum(1) / groups.count.clamp(min=1) * scale
    signal = float(covariance[groups.present].mean())
    tokens = table.lengths.double() if table.lengths is not None else torch.ones_like(advantages)
    squares = float((own.square() * tokens)[valid].mean())
    silent = ((advantages == 0) | ~valid).all(1)[groups.present]
    return AdvantageSummary(
        advantages=own,
        spread=float(seen.std(correction=0)),
        largest=float(seen.abs().max()),
        silent=float(silent.double().mean()),
        groups=count_advantage_groups(advantages, valid),
        noise=squares / signal**2 if signal else None,
        metrics=dict(metrics or {}),
    )


def compare_estimators(
    table: RewardTable, choices: Mapping[str, tuple[str, Mapping[str, Any]]]
) -> tuple[dict[str, AdvantageSummary], dict[str, str]]:
    """Every estimator on one reward table.

    Args:
        choices: label -> (estimator, parameters).

    Returns:
        Summaries by label; and for each estimator that cannot run on this table, why.
    """
    summaries, left_out = {}, {}
    smallest = int(table.mask.sum(1)[table.mask.any(1)].min())
    for label, (name, params) in choices.items():
        missing = unmet_needs(
            name,
            params,
            group_size=smallest,
            prompts=int(table.mask.any(1).sum()),
            rewards=table.names,
            greedy=table.greedy is not None,
        )
        if missing:
            left_out[label] = "; ".join(missing)
            continue
        estimate = make_advantage_estimator(name, **params)(table)
        summaries[label] = summarize_advantages(table, estimate.advantages, estimate.metrics)
    return summaries, left_out


@dataclass
class WeightSummary:
    """Of one gradient weight on one step's tokens.

    Attributes:
        weights: F, float64 [tokens].
        mean, largest: of F over tokens with A != 0.
        stopped: share of tokens with A != 0 that get no gradient.
        region_weight: mean F in each region of DGPO's Table 1 that has tokens.
        push: mean |F A| / mean |w A|: the gradient's size against plain importance weighting.
        effective: (sum |F A|)^2 / (N sum (F A)^2), N tokens with A != 0: the share that would do with equal weights.
    """

    weights: Tensor
    mean: float
    largest: float
    stopped: float
    region_weight: dict[str, float]
    push: float
    effective: float


def compare_weights(
    log_ratio: Tensor,
    advantages: Tensor,
    sequence_ids: Tensor,
    choices: Mapping[str, tuple[str, Mapping[str, Any]]],
    *,
    ratio: str = "token",
    bounds: tuple[float, float] = (0.2, 0.2),
) -> tuple[dict[str, WeightSummary], dict[str, float]]:
    """Every gradient weight on one step's tokens.

    Args:
        log_ratio: log of pi / pi_old, [tokens] over whole rollouts.
        advantages: each rollout's, repeated on its tokens.
        sequence_ids: int64 [tokens], which rollout each token belongs to.
        choices: label -> (gradient weight, parameters).
        ratio: level of the ratio, as `algorithm.ratio`.
        bounds: (eps_low, eps_high) that regions are counted at.

    Returns:
        Summaries by label; and the share of tokens in each region.
    """
    check_choice("the ratio level", ratio, RATIOS)
    log_ratio, advantages = log_ratio.double(), advantages.double()
    if ratio != "token":
        everything = torch.ones_like(log_ratio, dtype=torch.bool)
        log_ratio = sequence_log_ratio(log_ratio, everything, sequence_ids, mean=ratio == "sequence")
    region = regions(log_ratio, advantages, *bounds)
    live = advantages != 0
    plain = make_gradient_weight("none")(log_ratio, advantages)
    summaries = {}
    for label, (name, params) in choices.items():
        weight = make_gradient_weight(name, **params)(log_ratio, advantages)
        summaries[label] = _summarize_weight(weight, plain, advantages, region, live)
    shares = {name: _mean((region == index).double()) for index, name in enumerate(REGIONS)}
    return summaries, shares


def _summarize_weight(weight: Tensor, plain: Tensor, advantages: Tensor, region: Tensor, live: Tensor) -> WeightSummary:
    seen, push = weight[live], (weight * advantages)[live].abs()
    squares = float(push.square().sum())
    inside = {name: weight[live & (region == index)] for index, name in enumerate(REGIONS)}
    return WeightSummary(
        weights=weight,
        mean=_mean(seen),
        largest=float(seen.max()) if len(seen) else 0.0,
        stopped=_mean((seen == 0).double()),
        region_weight={name: _mean(values) for name, values in inside.items() if len(values)},
        push=float(push.sum()) / max(float((plain * advantages)[live].abs().sum()), 1e-300),
        effective=float(push.sum()) ** 2 / (len(push) * squares) if squares else 0.0,
    )


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0


def default_choices(names: Sequence[str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Methods at their default parameters, labelled by their names."""
    return {name: (name, {}) for name in names}
