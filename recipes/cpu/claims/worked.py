"""Sums of three digits up to 5, answered at once or with the first two added first, and rewards for length.yaml.

A prompt is `3+5-4=`; an answer that works says `8=4`, one that does not `4`. Of the demonstrations half work; what they say
is right, while of those that do not 85 of 100 are wrong by 1 or 2. So a short answer is a worse one until training makes it
better.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping

_WORKED, _WRONG = 0.5, 0.85  # shares: of the demonstrations, and of those without work

Reward = Callable[[str, Mapping[str, str]], float]


def chains(seed: int) -> Iterator[dict[str, str]]:
    """Prompts with their values and a demonstration, without end."""
    draw = random.Random(f"chains {seed}")
    while True:
        first, *rest = (draw.randint(1, 5) for _ in range(3))
        signs = [draw.choice((1, -1)) for _ in rest]
        between = first + signs[0] * rest[0]
        value = between + signs[1] * rest[1]
        prompt = str(first) + "".join(
            f"{'+' if sign > 0 else '-'}{number}" for sign, number in zip(signs, rest, strict=True)
        )
        if draw.random() < _WORKED:
            reply = f"{between}={value}"
        else:
            reply = str(value + (draw.choice((-2, -1, 1, 2)) if draw.random() < _WRONG else 0))
        yield {"prompt": f"{prompt}=", "answer": str(value), "reply": reply}


def correct() -> Reward:
    """1 for the right value behind the last `=`."""
    return lambda response, sample: float(response.rpartition("=")[2] == sample["answer"])


def short(characters: int = 2) -> Reward:
    """1 for at most so many characters."""
    return lambda response, sample: float(len(response) <= characters)


def always() -> Reward:
    """1: the condition that every answer meets."""
    return lambda response, sample: 1.0
