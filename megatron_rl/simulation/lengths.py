"""How long responses are: log-normal, or as a run has recorded them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from megatron_rl.predict.lengths import BETWEEN

Tokens = np.ndarray  # int64


class Lengths(Protocol):
    def draw(self, rng: np.random.Generator, prompts: int, count: int) -> tuple[Tokens, np.ndarray]:
        """Tokens of `count` responses to each of `prompts`, [prompts, count]; and how long they are expected to be, float64
        [prompts]: the mean of as many other responses to the same prompt."""
        ...


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
        chosen = [self.groups[i] for i in rng.integers(len(self.groups), size=prompts)]
        tokens = np.stack([rng.choice(group, size=2 * count, replace=len(group) < 2 * count) for group in chosen])
        return tokens[:, :count], tokens[:, count:].mean(1)


def read_lengths(run: Path, limit: int | None = None) -> Sequence[Tokens]:
    """Tokens of all responses, [prompts, group size], of every step that a run has recorded, in order; cut at `limit`. `run`:
    its folder, or one `rollouts/step_<n>.npz`.

    Raises:
        ValueError: there are none.
    """
    files = [run] if run.is_file() else sorted((run / "rollouts").glob("step_*.npz"), key=_step)
    if not files:
        raise ValueError(f"{run} has no recorded rollouts (rollouts/step_<n>.npz); logging.record_every writes them")
    return [np.minimum(_read(file), limit) if limit is not None else _read(file) for file in files]


def _step(file: Path) -> int:
    return int(file.stem.removeprefix("step_"))


def _read(file: Path) -> Tokens:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            tokens = np.rint(arrays["lengths"]).astype(np.int64)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{file} is no recorded step with `lengths`: {error}") from None
    if tokens.ndim != 2 or not tokens.size or tokens.min() < 1:
        raise ValueError(f"{file}: `lengths` are not the tokens of groups of responses")
    return tokens
