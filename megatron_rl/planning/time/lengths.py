"""How long responses are: a distribution cut at the recipe's limit, given by a few numbers or as a run has recorded it. For
arithmetic `Lengths`, to draw from `LogNormal` and `Recorded`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron_rl.runtime.arrays import read_arrays

Tokens = np.ndarray  # int64
_CELLS = 64
_MOST_SPREAD = 10.0  # of logarithms: lengths that differ by factors of thousands
BETWEEN = 0.5  # share of the variance that lies between prompts, and not between the responses to one; a guess


@dataclass(frozen=True)
class Lengths:
    """Response lengths, as the share that is longer than each of evenly spaced lengths; and the mean prompt.

    Attributes:
        alive: share of the responses longer than (i + 1/2) × `cell` tokens, for the i-th cell.
        cell: tokens.
        prompt: mean prompt, tokens.
    """

    alive: tuple[float, ...]
    cell: float
    prompt: float

    @classmethod
    def log_normal(cls, mean: float, limit: int, *, spread: float = 0.6, prompt: float = 0.0) -> Lengths:
        """Logarithms with standard deviation `spread`; longer responses end at `limit`, and `mean` is that of what is left.

        Raises:
            ValueError: the mean is not between 0 and the limit, or the spread not above 0 or too large.
        """
        if not 0 < mean < limit or not 0 < spread <= _MOST_SPREAD:
            raise ValueError(
                f"responses of {mean:g} tokens in the mean, spread {spread:g}: at most {limit} tokens each, and a spread of "
                f"{_MOST_SPREAD:g}"
            )
        cell = limit / _CELLS
        low, high = math.log(mean) - spread**2, math.log(limit) + 20 * spread
        for _ in range(60):
            middle = (low + high) / 2
            alive = tuple(_survival((i + 0.5) * cell, middle, spread) for i in range(_CELLS))
            low, high = (middle, high) if sum(alive) * cell < mean else (low, middle)
        return cls(alive, cell, prompt)

    @classmethod
    def recorded(cls, responses: Sequence[int] | np.ndarray, prompt: float) -> Lengths:
        """Reads the lengths of a run."""
        values = np.sort(np.asarray(responses, float))
        cell = float(values[-1]) / _CELLS
        at = (np.arange(_CELLS) + 0.5) * cell
        alive = 1 - np.searchsorted(values, at, side="right") / len(values)
        return cls(tuple(map(float, alive)), cell, prompt)

    @cached_property
    def mean(self) -> float:
        """Tokens of a response."""
        return sum(self.alive) * self.cell

    @cached_property
    def total(self) -> float:
        """Tokens of a prompt and its response, mean."""
        return self.prompt + self.mean

    @cached_property
    def square(self) -> float:
        """Mean of the square of a response's length."""
        return 2 * sum(share * (i + 0.5) for i, share in enumerate(self.alive)) * self.cell**2

    @cached_property
    def pairs(self) -> float:
        """Pairs of a query and a key that causal attention computes for a sequence, mean."""
        return (self.prompt**2 + 2 * self.prompt * self.mean + self.square) / 2

    @cached_property
    def remaining(self) -> float:
        """Tokens that a response under way has before it, mean over a long time with constantly many under way."""
        return self.square / (2 * self.mean)

    def longer(self, factor: float) -> Lengths:
        """Returns the distribution with `factor` times the mean, or as near to it as the limit lets them: fewer responses
        end at every length."""
        low, high = 1e-3, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            mean = sum(share**middle for share in self.alive) * self.cell
            low, high = (middle, high) if mean > factor * self.mean else (low, middle)
        return Lengths(tuple(share**high for share in self.alive), self.cell, self.prompt)

    def longest(self, count: float) -> float:
        """Expected length of the longest of `count` responses, tokens."""
        return sum(1 - (1 - share) ** count for share in self.alive) * self.cell

    def quantiles(self, count: int) -> np.ndarray:
        """`count` responses that stand for all, ascending; float64 [count]."""
        shares = 1 - np.asarray([1.0, *self.alive])
        at = np.concatenate([[0.0], (np.arange(len(self.alive)) + 0.5) * self.cell])
        rank = (np.arange(count) + 0.5) / count
        limit = len(self.alive) * self.cell
        return np.minimum(np.interp(rank, shares, at, right=limit), limit)


def _survival(length: float, location: float, spread: float) -> float:
    return 0.5 * math.erfc((math.log(length) - location) / (spread * math.sqrt(2)))


@dataclass(frozen=True)
class LogNormal:
    """Responses longer than `limit` are cut there; `mean` is that of what is left.

    `spread`: standard deviation of the logarithm; 0: all are equally long. `between`: the share of its variance that lies
    between prompts, and not between the responses to one.
    """

    mean: float
    spread: float
    limit: int
    between: float = BETWEEN

    def __post_init__(self) -> None:
        if not 0 < self.mean <= self.limit or self.spread < 0 or not 0 <= self.between <= 1:
            raise ValueError(
                f"responses of {self.mean:g} tokens in the mean, spread {self.spread:g}, {self.between:g} of it between "
                f"prompts: at most {self.limit} tokens each"
            )

    @cached_property
    def middle(self) -> float:
        """Mean of the logarithm before the cut."""
        if self.spread == 0:
            return math.log(self.mean)
        low, high = math.log(self.mean) - self.spread**2, math.log(self.limit) + 20 * self.spread
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._cut(middle) < self.mean else (low, middle)
        return middle

    def _cut(self, middle: float) -> float:
        """Mean of a log-normal variable that is cut at the limit."""
        at = (math.log(self.limit) - middle) / self.spread
        whole = math.exp(middle + self.spread**2 / 2)
        return whole * _below(at - self.spread) + self.limit * (1 - _below(at))

    def draw(self, rng: np.random.Generator, prompts: int, count: int) -> tuple[Tokens, np.ndarray]:
        """Tokens of `count` responses to each of `prompts`, [prompts, count]; and how long they are expected to be, float64
        [prompts]: the mean of as many other responses to the same prompt."""
        of_prompt = self.middle + self.spread * math.sqrt(self.between) * rng.standard_normal((prompts, 1))
        each = of_prompt + self.spread * math.sqrt(1 - self.between) * rng.standard_normal((prompts, 2 * count))
        tokens = np.clip(np.rint(np.exp(each)), 1, self.limit).astype(np.int64)
        return tokens[:, :count], tokens[:, count:].mean(1)


def _below(value: float) -> float:
    """Share of the normal distribution."""
    return 0.5 * math.erfc(-value / math.sqrt(2))


@dataclass(frozen=True)
class Recorded:
    """Groups of a run: prompts are drawn from those of all steps, with replacement, and responses from a prompt's own."""

    groups: tuple[Tokens, ...]  # each [responses]

    def draw(self, rng: np.random.Generator, prompts: int, count: int) -> tuple[Tokens, np.ndarray]:
        """As `LogNormal.draw`."""
        chosen = [self.groups[i] for i in rng.integers(len(self.groups), size=prompts)]
        tokens = np.stack([rng.choice(group, size=2 * count, replace=len(group) < 2 * count) for group in chosen])
        return tokens[:, :count], tokens[:, count:].mean(1)


def read_lengths(run: Path, limit: int | None = None) -> Sequence[Tokens]:
    """Tokens of all responses, [prompts, group size], of every step that a run has recorded, in order; cut at `limit`. `run`:
    its folder, or one `rollouts/step_<n>.npz`.

    Raises:
        ValueError: there are none.
    """
    files = [run] if run.is_file() else recorded_files(run)
    if not files:
        raise ValueError(f"{run} has no recorded rollouts (rollouts/step_<n>.npz); logging.record_every writes them")
    return [np.minimum(_read(file), limit) if limit is not None else _read(file) for file in files]


def recorded_files(run: Path) -> list[Path]:
    """The `rollouts/step_<n>.npz` of a run's folder, in the order of steps."""
    files = (run / "rollouts").glob("step_*.npz")
    steps = {int(step[1]): path for path in files if (step := re.fullmatch(r"step_(\d+)", path.stem))}
    return [steps[step] for step in sorted(steps)]


def _read(file: Path) -> Tokens:
    lengths = read_arrays(file, ("lengths",), "a recorded step")["lengths"]
    if lengths.dtype.kind not in "fiu" or lengths.ndim != 2 or not lengths.size or not lengths.min() >= 1:
        raise ValueError(f"{file}: `lengths` are not the tokens of groups of responses")
    return np.rint(lengths).astype(np.int64)
