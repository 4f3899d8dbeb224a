"""Whether two recipes that ran with the same seeds differ: an exact test, and an interval, without a distribution.

Seeds are pairs: the same prompts in the same order, and the same warm-up. Under the hypothesis that the difference is d, and
symmetric about it, each pair's deviation from d could as well have had the other sign. Hartigan (1969, "Using subsample
values as typical values") gives the consequence that both use: the means of the 2^n - 1 subsets of the n differences cut
the line into 2^n intervals, and d is in each of them with the same probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from megatron_rl.base.messages import ConfigError, unknown_name
from megatron_rl.report.run_record import RunRecord, by_recipe, recipe_name, shown_evaluations

MOST_PAIRS = 16  # pairs: 65,535 subsets


@dataclass(frozen=True)
class PairedDifference:
    """`mean`: of the second minus the first. `interval`: of 95 %; None where the pairs are too few for one (5 or less).
    `p`: two-sided, of no difference; at least 2^(1 - n)."""

    pairs: int
    mean: float
    interval: tuple[float, float] | None
    p: float

    def __str__(self) -> str:
        ends = "" if self.interval is None else f" ({self.interval[0]:+.3g} to {self.interval[1]:+.3g})"
        return f"{self.mean:+.3g}{ends}, p = {self.p:.2g}"


def paired_difference(first: Sequence[float], second: Sequence[float]) -> PairedDifference:
    """Compares two recipes' numbers, seed by seed.

    Raises:
        ValueError: the lengths differ, or are not 2 to 16.
    """
    differences = np.subtract(second, first, dtype=np.float64)
    if not 2 <= len(differences) <= MOST_PAIRS:
        raise ValueError(f"{len(differences)} pairs: the test takes 2 to {MOST_PAIRS}")
    means = np.sort(_subset_means(differences))
    cells = len(means) + 1
    below, above = 1 + np.sum(means <= 0), 1 + np.sum(means >= 0)  # intervals on either side of no difference
    outside = int(0.025 * cells)  # intervals beyond each end
    interval = (float(means[outside - 1]), float(means[-outside])) if outside else None
    p = min(1.0, 2 * float(min(below, above)) / cells)
    return PairedDifference(len(differences), float(differences.mean()), interval, p)


def _subset_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the mean of every subset but the empty one: float64 [2^n - 1]."""
    members = (np.arange(1, 2 ** len(values))[:, None] >> np.arange(len(values))) & 1
    means: NDArray[np.float64] = members @ values / members.sum(1)
    return means


@dataclass(frozen=True)
class RecipeDifference:
    """A metric under two recipes, and how they differ."""

    metric: str
    first: str
    second: str
    means: tuple[float, float]  # over the seeds that both have
    difference: PairedDifference


def recipe_differences(runs: Sequence[RunRecord], metrics: Sequence[str] = ()) -> list[RecipeDifference]:
    """Compares each metric under the first run's recipe with each other recipe that ran with at least two of its seeds.

    Of an evaluation a run's last value counts, of other metrics the mean over its steps. Runs that have not taken all their
    steps are left out. `metrics`: where none is named, all evaluations, without one `reward/mean`.

    Raises:
        ConfigError: a metric that no run has.
    """
    known = sorted({name for run in runs for name in run.metrics()})
    for name in metrics:
        if name not in known:
            raise ConfigError(unknown_name("metric", name, known))
    baseline, *others = by_recipe([run for run in runs if run.is_complete()]) or [[]]
    differences = []
    for other in others:
        for metric in metrics or shown_evaluations(known) or ["reward/mean"]:
            first, second = _by_seed(baseline, metric), _by_seed(other, metric)
            seeds = sorted(first.keys() & second.keys())[:MOST_PAIRS]
            if len(seeds) < 2:
                continue
            numbers = [first[seed] for seed in seeds], [second[seed] for seed in seeds]
            names = recipe_name(baseline[0]), recipe_name(other[0])
            means = fmean(numbers[0]), fmean(numbers[1])
            differences.append(RecipeDifference(metric, *names, means, paired_difference(*numbers)))
    return differences


def _by_seed(runs: Sequence[RunRecord], metric: str) -> dict[int, float]:
    numbers = {run.recipe.get("seed", 0): run.series(metric)[1] for run in runs}
    return {
        seed: values[-1] if metric.startswith("eval/") else fmean(values) for seed, values in numbers.items() if values
    }


def effects_note(differences: Sequence[RecipeDifference]) -> str:
    """Names the recipe and the test, and says where seeds are too few."""
    pairs = [each.difference.pairs for each in differences]
    note = f"Against {differences[0].first}, complete runs, seed by seed; p: sign-flip test of each metric alone."
    if max(pairs) == MOST_PAIRS:
        note += f" Of more than {MOST_PAIRS} seeds the first {MOST_PAIRS} are compared."
    if min(pairs) <= 5:
        note += f" {min(pairs)} seeds cannot give a p below {2 ** (1 - min(pairs)):.2g}: take 6 or more."
    return note


def as_lines(differences: Sequence[RecipeDifference]) -> list[str]:
    """Returns a line per metric and recipe for a terminal, and one on the test; none without differences."""
    lines = [
        f"{each.metric.removeprefix('eval/')}: {each.second}: {each.means[1]:.4g}, {each.difference}"
        for each in differences
    ]
    return [*lines, effects_note(differences)] if lines else []
