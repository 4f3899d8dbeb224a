"""Pass@k, and means over prompts with their uncertainty. Plain numbers in, plain numbers out.

The unit is the prompt: the responses to one prompt are correlated (a hard problem is hard every time), so an interval that
counts responses as independent is too short. Every estimate here is a mean of one number per prompt.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

_ROUNDING = 1e-12  # of a mean of numbers in [0, 1]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k samples is right) from c right ones among n (Chen et al. 2021, Eq. 1).

    Raises:
        ValueError: where k > n, or c is not between 0 and n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples per prompt, there are {n}")
    if not 0 <= c <= n:
        raise ValueError(f"{c} right samples of {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


@dataclass(frozen=True)
class Interval:
    """A mean over prompts.

    Attributes:
        value: the mean.
        stderr: its standard error over prompts; None for a single prompt.
        low, high: the confidence interval; None where the standard error is.
        prompts: how many prompts it is over.
    """

    value: float
    stderr: float | None
    low: float | None
    high: float | None
    prompts: int


def mean(values: Sequence[float], confidence: float, bounded: bool = True) -> Interval:
    """The mean of one number per prompt, with a confidence interval for the mean over the population of such prompts.

    The standard error is s / sqrt(n), s the standard deviation of the prompts' numbers: it holds whatever the correlation
    between the responses to one prompt. Numbers in [0, 1] get Wilson's score interval at the effective sample size
    m(1 - m) / stderr^2, which stays inside [0, 1] and does not shrink to a point where all numbers are 0 or 1; others
    get m +- t stderr. Both use Student's t with n - 1 degrees of freedom.

    Args:
        values: one per prompt, at least one.
        confidence: e.g. 0.95.
        bounded: the numbers are in [0, 1].
    """
    n = len(values)
    center = math.fsum(values) / n
    if n == 1:
        return Interval(center, None, None, None, 1)
    variance = math.fsum((value - center) ** 2 for value in values) / (n - 1)
    return _estimate(center, math.sqrt(variance / n), n - 1, n, confidence, bounded)


def combine(
    intervals: Sequence[Interval], weights: Sequence[float], confidence: float, bounded: bool = True
) -> Interval:
    """The weighted mean of independent estimates, one per task: the standard errors add in squares.

    Args:
        intervals: one per task.
        weights: of the same length; need not add up to 1.
        confidence, bounded: as in `mean`.
    """
    total = math.fsum(weights)
    shares = [weight / total for weight in weights]
    center = math.fsum(share * interval.value for share, interval in zip(shares, intervals, strict=True))
    prompts = sum(interval.prompts for interval in intervals)
    squares = []
    for share, interval in zip(shares, intervals, strict=True):
        if interval.stderr is None:
            return Interval(center, None, None, None, prompts)
        squares.append((share * interval.stderr) ** 2)
    # Welch and Satterthwaite's degrees of freedom of a sum of variances.
    below = math.fsum(square**2 / (interval.prompts - 1) for square, interval in zip(squares, intervals, strict=True))
    freedom = math.fsum(squares) ** 2 / below if below else prompts - len(intervals)
    return _estimate(center, math.sqrt(math.fsum(squares)), freedom, prompts, confidence, bounded)


def sampling_error(values: Sequence[Sequence[float]]) -> float | None:
    """Standard error of the mean of the prompts' means, for these very prompts: what another sampling seed would change.

    Args:
        values: per prompt, one number per response.

    Returns:
        None where no prompt has two responses to compare.
    """
    total = 0.0
    for row in values:
        if len(row) < 2:
            return None
        center = math.fsum(row) / len(row)
        total += math.fsum((value - center) ** 2 for value in row) / (len(row) - 1) / len(row)
    return math.sqrt(total) / len(values)


def _estimate(center: float, stderr: float, freedom: float, prompts: int, confidence: float, bounded: bool) -> Interval:
    quantile = t_quantile(0.5 + confidence / 2, freedom)
    if not bounded:
        return Interval(center, stderr, center - quantile * stderr, center + quantile * stderr, prompts)
    p = min(max(center, 0.0), 1.0)  # a mean of numbers in [0, 1], up to rounding
    # Equal numbers need not have their mean: it is rounded.
    size = p * (1 - p) / stderr**2 if stderr > _ROUNDING else float(prompts)
    square = quantile**2 / size
    middle = (p + square / 2) / (1 + square)
    half = quantile / (1 + square) * math.sqrt(p * (1 - p) / size + quantile**2 / (4 * size**2))
    # At 0 and 1 the interval begins and ends there, which the difference says up to rounding only.
    low = max(0.0, middle - half) if p > _ROUNDING else 0.0
    high = min(1.0, middle + half) if p < 1 - _ROUNDING else 1.0
    return Interval(center, stderr, low, high, prompts)


@functools.cache
def t_quantile(probability: float, freedom: float) -> float:
    """Quantile of Student's t, exact to 12 digits; `probability` between 0.5 and 1.

    P(|t| > x) is the regularised incomplete beta function I_y(freedom/2, 1/2) at y = freedom / (freedom + x^2), which falls
    as x grows: x is found by bisection.
    """
    if probability == 0.5:
        return 0.0
    from mpmath import mp, mpf  # comes with sympy, and that with torch

    with mp.workdps(30):
        outside, half = 2 * (1 - mpf(probability)), mpf(freedom) / 2

        def is_below(x: float) -> bool:
            return bool(mp.betainc(half, mpf(1) / 2, 0, freedom / (freedom + mpf(x) ** 2), regularized=True) > outside)

        low, high = 0.0, 2.0
        while is_below(high):
            low, high = high, 2 * high
        while high - low > 1e-12 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if is_below(middle) else (low, middle)
    return (low + high) / 2
