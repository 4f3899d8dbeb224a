"""Win rate against a baseline's answers, from a judge's verdicts in both orders: Arena-Hard's arithmetic.

A verdict counts once, "much better" and "much worse" three times; a tie is half a win. Both orders' verdicts are battles of
one pool, which is drawn anew 100 times: the mean of the draws' means is the win rate, with the draws' 5 and 95 % quantiles.
Version 0.1 fits Bradley-Terry strengths to these battles instead: where all models meet the baseline only, the fitted
probability of a win is the share of wins.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from megatron_rl.evaluation.statistics import Interval

ROUNDS, WEIGHT = 100, 3
_SEED = "win rate"


def battles(verdicts: Sequence[float]) -> list[float]:
    """Outcomes, 1 a win, 0.5 a tie, 0 a loss, of verdicts -2 to 2 from the response's side."""
    outcomes = []
    for verdict in verdicts:
        outcome = 0.5 if verdict == 0 else float(verdict > 0)
        outcomes += [outcome] * (WEIGHT if abs(verdict) == 2 else 1)
    return outcomes


def win_rate(pairs: Sequence[tuple[float, float]]) -> Interval | None:
    """Of verdicts in both orders. A pair with a missing one (NaN) is left out; None: no pair is left.

    The interval goes from the 5 to the 95 % quantile, whatever `evaluation.confidence`.
    """
    whole = [pair for pair in pairs if not any(map(math.isnan, pair))]
    if not whole:
        return None
    pool = [outcome for pair in whole for outcome in battles(pair)]
    draw = random.Random(_SEED)
    means = sorted(math.fsum(draw.choices(pool, k=len(pool))) / len(pool) for _ in range(ROUNDS))
    center = math.fsum(means) / ROUNDS
    spread = math.sqrt(math.fsum((value - center) ** 2 for value in means) / (ROUNDS - 1))
    return Interval(center, spread, _quantile(means, 0.05), _quantile(means, 0.95), len(whole))


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two nearest, as pandas has it."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
