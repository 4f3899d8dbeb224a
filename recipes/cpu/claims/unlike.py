"""Prompts of two difficulties, for mixtures.yaml: of the sums' demonstrations fewer are wrong than of the differences'."""

from __future__ import annotations

import random
from collections.abc import Iterator


def mixture(seed: int, spread: float) -> Iterator[dict[str, str]]:
    """Prompts as in two_rewards.py, without end. Of the sums' demonstrations a share of 0.5 - `spread` is wrong, of the
    differences' 0.5 + `spread`."""
    draw = random.Random(f"mixture {seed}")
    while True:
        first, second, sign = draw.randint(1, 9), draw.randint(1, 9), draw.choice((1, -1))
        value = first + sign * second
        error = draw.choice((-2, -1, 1, 2)) if draw.random() < 0.5 - sign * spread else 0
        yield {
            "prompt": f"{first}{'+' if sign > 0 else '-'}{second}=",
            "answer": str(value),
            "reply": str(value + error),
        }
