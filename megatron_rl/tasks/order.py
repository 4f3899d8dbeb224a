"""The order in which prompts are visited."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import lcm
from typing import Protocol

WINDOW = 1000  # most positions over which the weights come out


class Order(Protocol):
    """An endless order over samples, a pure function of position."""

    def take(self, position: int, count: int) -> list[int]: ...


class PromptOrder:
    """An endless shuffled order over `num_samples` prompts, a fresh shuffle per epoch.

    A pure function of (seed, position): the position is the only state, so a checkpoint stores one integer, and every
    process that asks for the same positions gets the same prompts.
    """

    def __init__(self, num_samples: int, seed: int | str) -> None:
        if num_samples < 1:
            raise ValueError(f"an order needs at least one prompt, not {num_samples}")
        self.num_samples = num_samples
        self.seed = seed
        self._epoch = -1
        self._shuffled: list[int] = []

    def take(self, position: int, count: int) -> list[int]:
        """Indices of the `count` prompts from `position` on (0: the first of the first epoch), across epochs."""
        if position < 0 or count < 0:
            raise ValueError(f"position and count must not be negative, not {position} and {count}")
        taken: list[int] = []
        while len(taken) < count:
            epoch, offset = divmod(position + len(taken), self.num_samples)
            taken += self._permutation(epoch)[offset : offset + count - len(taken)]
        return taken

    def _permutation(self, epoch: int) -> list[int]:
        if epoch != self._epoch:
            shuffled = list(range(self.num_samples))
            # Seeded by text, so that neighbouring seeds and epochs have nothing in common.
            random.Random(f"prompt order, seed {self.seed}, epoch {epoch}").shuffle(shuffled)
            self._epoch, self._shuffled = epoch, shuffled
        return self._shuffled


class MixedOrder:
    """An endless order over several tasks' prompts that gives each task its share, whatever its size.

    Every window of positions has each task in proportion to its weight, evenly spread: any stretch has each task within 2 of
    its share. The window is the shortest in which the weights give whole numbers, at most `WINDOW`; weights that do not fit
    are rounded to one in `WINDOW`, and no task to zero. Each task has its own epochs: its prompts are in a `PromptOrder`. A
    pure function of (seed, position), as `PromptOrder` is.

    Args:
        tasks: the task of every sample; the indices of `take` are positions in it.
        weights: a positive weight for every task; only their ratios matter.

    Raises:
        ValueError: a task without samples or without a weight, or a weight that is not positive.
    """

    def __init__(self, tasks: Sequence[str], weights: Mapping[str, float], seed: int) -> None:
        self.samples: dict[str, list[int]] = {name: [] for name in weights}
        for index, name in enumerate(tasks):
            if name not in self.samples:
                raise ValueError(f"the task {name} has no weight")
            self.samples[name].append(index)
        for name, samples in self.samples.items():
            if not samples:
                raise ValueError(f"the task {name} has a weight, but no prompts")
        self.orders = {name: PromptOrder(len(s), f"{seed}, task {name}") for name, s in self.samples.items()}
        self.window = spread(window_counts(weights))

    def take(self, position: int, count: int) -> list[int]:
        """Indices of the `count` prompts from `position` on."""
        windows, offset = divmod(position, len(self.window))
        seen = {name: windows * self.window.count(name) + self.window[:offset].count(name) for name in self.samples}
        taken = []
        for place in range(position, position + count):
            name = self.window[place % len(self.window)]
            taken.append(self.samples[name][self.orders[name].take(seen[name], 1)[0]])
            seen[name] += 1
        return taken


def window_counts(weights: Mapping[str, float]) -> dict[str, int]:
    """How often each task comes in a window: whole numbers, exactly in the ratio of the weights where `WINDOW` allows."""
    for name, weight in weights.items():
        if not 0 < weight < float("inf"):
            raise ValueError(f"tasks.train.{name}.weight = {weight}, must be positive")
    total = sum(Fraction(str(weight)) for weight in weights.values())
    shares = {name: Fraction(str(weight)) / total for name, weight in weights.items()}
    window = lcm(*(share.denominator for share in shares.values()))
    if window <= WINDOW:
        return {name: int(share * window) for name, share in shares.items()}
    counts = {name: max(1, int(share * WINDOW)) for name, share in shares.items()}
    by_rest = sorted(shares, key=lambda name: shares[name] * WINDOW - counts[name], reverse=True)
    for name in by_rest[: max(0, WINDOW - sum(counts.values()))]:  # largest remainders
        counts[name] += 1
    return counts


def spread(counts: Mapping[str, int]) -> list[str]:
    """A window with each name `counts[name]` times, evenly spread.

    After n positions every name has come within 1 of its share of n, which no simpler rule guarantees for more than two
    names: of those that are due, the one with the earliest deadline (Tijdeman, "The chairman assignment problem", 1980).
    """
    if len(counts) == 1:
        return [name for name, count in counts.items() for _ in range(count)]
    total = sum(counts.values())
    shares = {name: Fraction(count, total) for name, count in counts.items()}
    slack = Fraction(1, 2 * len(counts) - 2)
    came = dict.fromkeys(counts, 0)
    window = []
    for n in range(1, total + 1):
        behind = {name: share * n - came[name] for name, share in shares.items()}
        due = [name for name in counts if behind[name] >= slack]
        name = min(due, key=lambda name: ((1 - slack - behind[name]) / shares[name], name))
        came[name] += 1
        window.append(name)
    return window


def make_order(tasks: Sequence[str], weights: Mapping[str, float] | None, seed: int) -> Order:
    """The order of a run's training prompts: mixed by weight, or without weights every prompt once per epoch."""
    if weights is None:
        return PromptOrder(len(tasks), seed)
    return MixedOrder(tasks, weights, seed)
