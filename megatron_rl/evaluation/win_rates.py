"""Win rate against a baseline's answers, from a judge's verdicts in both orders: Arena-Hard's arithmetic.

A verdict counts once, "much better" and "much worse" three times; a tie is half a win. Both orders' verdicts are battles of
one pool, which is drawn anew 100 times: the mean of the draws' means is the win rate, with the draws' 5 and 95 % quantiles.
Version 0.1 fits Bradley-Terry strengths to these battles instead: where all models meet the baseline only, the fitted
probability of a win is the share of wins.

Version 2.0's style control adds features of the two answers' style to that fit: the win rate at equal style is what it gives
where they are 0, in the median of 100 draws. Its authors measure the features from their mean over the battles of all models
in a table; here is one model, whose mean is what shall be controlled, so 0 is the baseline's style.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_rl.evaluation.statistics import Interval

ROUNDS, WEIGHT = 100, 3
_SEED = "win rate"
_NEWTON = 100  # steps at most
_EQUAL = 1e-9  # a feature of style whose values differ by less than this share of the largest is constant
Floats = NDArray[np.float64]


def battles(verdicts: Sequence[float]) -> list[float]:
    """Outcomes, 1 a win, 0.5 a tie, 0 a loss, of verdicts -2 to 2 from the response's side."""
    outcomes = []
    for verdict in verdicts:
        outcome = 0.5 if verdict == 0 else float(verdict > 0)
        outcomes += [outcome] * (WEIGHT if abs(verdict) == 2 else 1)
    return outcomes


def win_rate(pairs: Sequence[tuple[float, float]]) -> Interval | None:
    """The score of verdicts in both orders. A pair with a missing one (NaN) is left out; None: no pair is left.

    The interval goes from the 5 to the 95 % quantile, whatever `evaluation.confidence`.
    """
    complete = [pair for pair in pairs if not any(map(math.isnan, pair))]
    if not complete:
        return None
    pool = [outcome for pair in complete for outcome in battles(pair)]
    draw = random.Random(_SEED)
    means = sorted(math.fsum(draw.choices(pool, k=len(pool))) / len(pool) for _ in range(ROUNDS))
    center = math.fsum(means) / ROUNDS
    spread = math.sqrt(math.fsum((value - center) ** 2 for value in means) / (ROUNDS - 1))
    return Interval(center, spread, _quantile(means, 0.05), _quantile(means, 0.95), len(complete))


def controlled_win_rate(pairs: Sequence[tuple[float, float]], styles: Sequence[Sequence[float]]) -> Interval | None:
    """The win rate at equal style, by logistic regression on all battles.

    Args:
        pairs: verdicts in both orders, as for `win_rate`.
        styles: of each pair, the features by which the response differs from the baseline's answer.
    """
    complete = [(pair, style) for pair, style in zip(pairs, styles, strict=True) if not any(map(math.isnan, pair))]
    rows = [(outcome, style) for pair, style in complete for verdict in pair for outcome in battles([verdict])]
    if not complete:
        return None
    outcomes, features = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    varies = np.ptp(features, axis=0) > _EQUAL * np.abs(features).max(axis=0)  # the deviation of equal numbers is not 0
    spread = features[:, varies].std(axis=0, ddof=1)
    features = np.column_stack([np.ones(len(rows)), features[:, varies] / spread])
    draw, places = random.Random(_SEED), range(len(rows))
    drawn = [draw.choices(places, k=len(rows)) for _ in range(ROUNDS)]
    shares = sorted(1 / (1 + math.exp(-logistic_fit(features[some], outcomes[some])[0])) for some in drawn)
    return Interval(
        _quantile(shares, 0.5),
        float(np.std(shares, ddof=1)),
        _quantile(shares, 0.05),
        _quantile(shares, 0.95),
        len(complete),
    )


def logistic_fit(features: Floats, outcomes: Floats) -> Floats:
    """Coefficients of a logistic regression by Newton's method; outcomes 0 to 1. A ridge of 1e-3 keeps them finite where the
    outcomes can be told apart without error. A step that would lose likelihood, as features with a few large values have
    it, is halved until it does not."""
    coefficients = np.zeros(features.shape[1])
    ridge = 1e-3 * np.eye(features.shape[1])

    def loss(at: Floats) -> float:
        scores = features @ at
        return float(np.logaddexp(0, scores).sum() - outcomes @ scores + at @ ridge @ at / 2)

    for _ in range(_NEWTON):
        p = 1 / (1 + np.exp(-features @ coefficients))
        slope = features.T @ (outcomes - p) - ridge @ coefficients
        step = np.linalg.solve((features.T * (p * (1 - p))) @ features + ridge, slope)
        most = loss(coefficients) * (1 + 1e-9)  # rounding is no loss
        while loss(coefficients + step) > most:
            step /= 2
        coefficients += step
        if np.abs(step).max() < 1e-9:
            break
    return coefficients


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two nearest, as pandas has it."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
