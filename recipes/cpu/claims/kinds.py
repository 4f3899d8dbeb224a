"""Two kinds of prompts of equal difficulty, for gradients.yaml: a sum of two digits (`3+8=`), and the larger of two (`3.8=`).

Of either kind's demonstrations every second is wrong by 1 or 2.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal


def kind(seed: int, of: Literal["sum", "larger"]) -> Iterator[dict[str, str]]:
    """Prompts with their values and a demonstration, without end."""
    draw = random.Random(f"{of} {seed}")
    while True:
        first, second = draw.randint(1, 9), draw.randint(1, 9)
        value, sign = (first + second, "+") if of == "sum" else (max(first, second), ".")
        error = draw.choice((-2, -1, 1, 2)) if draw.random() < 0.5 else 0
        yield {"prompt": f"{first}{sign}{second}=", "answer": str(value), "reply": str(value + error)}
