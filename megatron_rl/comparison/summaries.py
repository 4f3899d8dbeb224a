"""Numbers that compare estimators and surrogates on one step: pure functions of its rewards and log-probs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_rl.algorithms import (
    REGIONS,
    Groups,
    RewardTable,
    count_advantage_groups,
    make_advantage_estimator,
    make_surrogate,
    regions,
)
from megatron_rl.algorithms.correction import sequence_log_ratio

Parameters = Mapping[str, Mapping[str, object]]
"""By the method's name: those of its parameters that are not at their defaults."""
_BOUNDS = 0.2, 0.2  # eps_low and eps_high that regions are counted at


@dataclass
class AdvantageSummary:
    """Summary of one estimator's advantages of one step.

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
    """Makes an `AdvantageSummary` of `advantages` [n, m]."""
    groups, valid = Groups(table), table.mask
    advantages = advantages.double()
    seen = advantages[valid]
    scale = groups.count / (groups.count - 1).clamp(min=1)
    masked = torch.where(valid, advantages, 0.0)
    covariance = (masked * groups.centred.values).sum(1) / groups.count.clamp(min=1) * scale
    signal = float(covariance[groups.present].mean())
    tokens = table.lengths.double() if table.lengths is not None else torch.ones_like(advantages)
    squares = float((masked.square() * tokens)[valid].mean())
    silent = ((advantages == 0) | ~valid).all(1)[groups.present]
    return AdvantageSummary(
        advantages=masked,
        spread=float(seen.std(correction=0)),
        largest=float(seen.abs().max()),
        silent=float(silent.double().mean()),
        groups=count_advantage_groups(advantages, valid),
        noise=squares / signal**2 if signal else None,
        metrics=dict(metrics or {}),
    )


def compare_estimators(
    table: RewardTable, names: Sequence[str], params: Parameters | None = None
) -> tuple[dict[str, AdvantageSummary], dict[str, str]]:
    """Estimators on one reward table, with the parameters given for them or else their defaults.

    Returns:
        Summaries by name; and for each estimator that cannot run on this table, why.
    """
    summaries, left_out = {}, {}
    for name in names:
        estimator = make_advantage_estimator(name, **(params or {}).get(name, {}))
        if missing := estimator.unmet(table):
            left_out[name] = "; ".join(missing)
            continue
        estimate = estimator(table)
        summaries[name] = summarize_advantages(table, estimate.advantages, estimate.metrics)
    return summaries, left_out


@dataclass
class WeightSummary:
    """Summary of one surrogate on one step's tokens.

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
    names: Sequence[str],
    *,
    ratio: str = "token",
    params: Parameters | None = None,
) -> tuple[dict[str, WeightSummary], dict[str, float]]:
    """Surrogates on one step's tokens, with the parameters given for them or else their defaults.

    Args:
        log_ratio: log of pi / pi_old, [tokens] over whole rollouts.
        advantages: each rollout's, repeated on its tokens.
        sequence_ids: int64 [tokens], which rollout each token belongs to.
        names: the surrogates.
        ratio: level of the ratio, as `algorithm.ratio`.
        params: by the weight's name.

    Returns:
        Summaries by name; and the share of tokens in each region.
    """
    log_ratio, advantages = log_ratio.double(), advantages.double()
    if ratio != "token":
        everything = torch.ones_like(log_ratio, dtype=torch.bool)
        log_ratio = sequence_log_ratio(log_ratio, everything, sequence_ids, mean=ratio == "sequence")
    region = regions(log_ratio, advantages, *_BOUNDS)
    live = advantages != 0
    plain = make_surrogate("none")(log_ratio, advantages)
    summaries = {}
    for name in names:
        weight = make_surrogate(name, **(params or {}).get(name, {}))(log_ratio, advantages)
        summaries[name] = _summarize_weight(weight, plain, advantages, region, live)
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
