"""How long responses are: a distribution cut at the recipe's limit, given by a few numbers or recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

_CELLS = 64
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
            ValueError: the mean is not between 0 and the limit, or the spread not above 0.
        """
        if not 0 < mean < limit or spread <= 0:
            raise ValueError(
                f"responses of {mean:g} tokens in the mean, spread {spread:g}: at most {limit} tokens each"
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
        """Those of a run."""
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
        """With `factor` times the mean, or as near to it as the limit lets them: fewer responses end at every length."""
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
