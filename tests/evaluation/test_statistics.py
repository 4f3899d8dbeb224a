"""Pass@k and intervals against brute force, textbook values and simulation with a known truth."""

from __future__ import annotations

import itertools
import math
import random
from statistics import NormalDist

import pytest

from megatron_rl.evaluation.statistics import Interval, combine, mean, pass_at_k, sampling_error, t_quantile


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (5, 0), (5, 2), (6, 6), (7, 3)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n: int, c: int) -> None:
    outcomes = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(outcomes, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_needs_k_samples() -> None:
    with pytest.raises(ValueError, match="pass@3"):
        pass_at_k(2, 1, 3)


@pytest.mark.parametrize(
    ("freedom", "value"),
    [
        (1, math.tan(0.475 * math.pi)),
        (2, 0.95 * math.sqrt(2 / (1 - 0.95**2))),
        (3, 3.182446305284263),
        (7, 2.364624251592785),
        (29, 2.045229642132703),
        (1e9, NormalDist().inv_cdf(0.975)),
    ],
)
def test_students_t(freedom: float, value: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(value, rel=1e-8)


def test_the_quantile_of_fractional_degrees_of_freedom_lies_between() -> None:
    assert t_quantile(0.975, 3) > t_quantile(0.975, 3.5) > t_quantile(0.975, 4) > t_quantile(0.9, 4) > 0


def simulate(prompts: int, rollouts: int, a: float, b: float, seed: int) -> list[float]:
    """Shares of right responses per prompt, whose probability is Beta(a, b): hard prompts are hard every time."""
    source = random.Random(seed)
    chances = [source.betavariate(a, b) for _ in range(prompts)]
    return [sum(source.random() < p for _ in range(rollouts)) / rollouts for p in chances]


@pytest.mark.parametrize(("prompts", "rollouts", "a", "b"), [(30, 16, 0.3, 0.7), (30, 1, 0.5, 0.5), (100, 8, 0.5, 0.5)])
def test_intervals_cover_the_truth_as_often_as_they_say(prompts: int, rollouts: int, a: float, b: float) -> None:
    truth, repetitions = a / (a + b), 600
    covered = naive = 0
    for seed in range(repetitions):
        shares = simulate(prompts, rollouts, a, b, seed)
        estimate = mean(shares, 0.95)
        assert estimate.low is not None
        assert estimate.high is not None
        covered += estimate.low <= truth <= estimate.high
        error = math.sqrt(estimate.value * (1 - estimate.value) / (prompts * rollouts))
        naive += abs(estimate.value - truth) <= 1.96 * error
    assert covered / repetitions == pytest.approx(0.95, abs=0.03)
    if rollouts > 1:
        assert naive / repetitions < 0.8, "responses counted as independent give intervals that are too short"


def test_the_standard_error_is_what_repetition_shows() -> None:
    estimates = [mean(simulate(50, 4, 1.0, 2.0, seed), 0.95) for seed in range(400)]
    center = sum(e.value for e in estimates) / len(estimates)
    spread = math.sqrt(sum((e.value - center) ** 2 for e in estimates) / (len(estimates) - 1))
    claimed = math.sqrt(sum((e.stderr or 0.0) ** 2 for e in estimates) / len(estimates))
    assert claimed == pytest.approx(spread, rel=0.1)


def test_none_right_is_not_certainty_and_its_interval_begins_at_0() -> None:
    for count in range(2, 200):
        estimate = mean([0.0] * count, 0.95)
        assert estimate.low == 0.0
        assert mean([1.0] * count, 0.95).high == 1.0
    assert estimate.high is not None
    assert 0.01 < estimate.high < 0.05


def test_all_right_is_not_certainty() -> None:
    estimate = mean([1.0] * 30, 0.95)
    assert (estimate.value, estimate.high) == (1.0, 1.0)
    assert estimate.low == pytest.approx(30 / (30 + t_quantile(0.975, 29) ** 2))


@pytest.mark.parametrize("count", [20, 25, 50])
def test_prompts_with_the_same_number_are_not_certainty(count: int) -> None:
    """The mean of 25 thirds is not a third: the deviation from it is rounding, and not 0."""
    estimate = mean([1 / 3] * count, 0.95)
    assert estimate.low is not None
    assert estimate.high is not None
    assert estimate.low < 0.25 < 0.4 < estimate.high


def test_one_prompt_has_no_interval() -> None:
    assert mean([0.5], 0.95) == Interval(0.5, None, None, None, 1)


def test_lengths_get_a_plain_t_interval() -> None:
    estimate = mean([100.0, 200.0, 300.0], 0.95, bounded=False)
    assert estimate.stderr == pytest.approx(100 / math.sqrt(3))
    assert estimate.high == pytest.approx(200 + t_quantile(0.975, 2) * 100 / math.sqrt(3))


def test_tasks_combine_as_one_pool_would() -> None:
    """Micro over tasks of the same kind: close to the estimate of all prompts together."""
    left, right = simulate(200, 4, 1, 1, 1), simulate(100, 4, 1, 1, 2)
    parts = [mean(left, 0.95), mean(right, 0.95)]
    micro, pooled = combine(parts, [200, 100], 0.95), mean(left + right, 0.95)
    assert micro.value == pytest.approx(pooled.value)
    assert micro.stderr == pytest.approx(pooled.stderr, rel=0.02)
    macro = combine(parts, [1, 1], 0.95)
    assert macro.value == pytest.approx((parts[0].value + parts[1].value) / 2)
    assert macro.prompts == 300


def test_sampling_error_is_that_of_other_seeds_on_the_same_prompts() -> None:
    chances = [0.1, 0.5, 0.9, 0.5]
    source = random.Random(5)
    runs = [[[float(source.random() < p) for _ in range(8)] for p in chances] for _ in range(500)]
    means = [sum(sum(row) / 8 for row in run) / 4 for run in runs]
    center = sum(means) / len(means)
    spread = math.sqrt(sum((m - center) ** 2 for m in means) / (len(means) - 1))
    errors = [sampling_error(run) for run in runs]
    assert math.sqrt(sum((e or 0.0) ** 2 for e in errors) / len(errors)) == pytest.approx(spread, rel=0.1)
    assert sampling_error([[1.0], [0.0]]) is None
