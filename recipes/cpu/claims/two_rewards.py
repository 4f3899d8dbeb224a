"""Two rewards of unlike size and frequency for one answer, and an estimator that lacks what GDPO adds: for gdpo.yaml.

A prompt is a sum of two digits (`3+8=`), an answer its value, with or without a full stop (`11.`). Of the answers that the
warm-up imitates every second is wrong by 1 or 2, and one in twenty has the full stop.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping

from megatron_rl.algorithms import Groups, advantage_estimator

_WRONG, _MARKED = 0.5, 0.05  # shares of the demonstrations


def sums(seed: int) -> Iterator[dict[str, str]]:
    """Prompts with their values and a demonstration, without end."""
    draw = random.Random(f"marked sums {seed}")
    while True:
        first, second, sign = draw.randint(1, 9), draw.randint(1, 9), draw.choice((1, -1))
        value = first + sign * second
        said = value + (draw.choice((-2, -1, 1, 2)) if draw.random() < _WRONG else 0)
        mark = "." if draw.random() < _MARKED else ""
        yield {"prompt": f"{first}{'+' if sign > 0 else '-'}{second}=", "answer": str(value), "reply": f"{said}{mark}"}


def right(size: float = 3.0) -> Callable[[str, Mapping[str, str]], float]:
    """`size` for the right value, else -`size`: ToolRL's scale of correctness, beside a format of 0 or 1."""
    return lambda response, sample: size if response.removesuffix(".") == sample["answer"] else -size


def marked() -> Callable[[str, Mapping[str, str]], float]:
    """1 for a number with a full stop behind it, right or not."""
    return lambda response, sample: float(re.fullmatch(r"-?[0-9]+[.]", response) is not None)


@advantage_estimator("summed_first")
def summed_first(groups: Groups) -> object:
    """GDPO without its essential term: the rewards' sum is normalised in the group, not each reward (Eq. 4); then over the
    batch, as in GDPO (Eq. 6)."""
    std = groups.std(groups.centred, 1)
    normalised = groups.centred.values / std.where(std > 0, 1.0)
    return groups.whiten(normalised, "sequences", ddof=1, eps=1e-8, eps_mode="std_add")
