"""A preference that can be computed: which of two replies names the digits of the prompt, all of them and no others.

The prompt is some different digits (`8301=`), a reply is digits with a full stop behind them (`1083.`). How good a reply is
is the F1 score of the digits in it against the prompt's: 1 where it has each of them, in any order, and no other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping

DIGITS = "0123456789"
LEAST_DIFFERENCE = 0.1  # between the two replies of a pair


def agreement(prompt: str, reply: str) -> float:
    """The true preference, 0 to 1: F1 of the reply's digits; 0 for a reply that is not digits and a full stop."""
    digits = reply.removesuffix(".")
    if not digits.isdigit() or digits == reply:
        return 0.0
    asked, named = set(prompt.removesuffix("=")), set(digits)
    return 2 * len(asked & named) / (len(asked) + len(named))


def true_preference() -> Callable[[str, Mapping[str, str]], float]:
    """The reward that the reward model is to stand for."""
    return lambda reply, sample: agreement(sample["prompt"], reply)


def prompt(draw: random.Random) -> str:
    return "".join(draw.sample(DIGITS, draw.randint(3, 6))) + "="


def reply(draw: random.Random, prompt: str) -> str:
    """Each of the prompt's digits with a probability of its own draw, and up to four others; then up to four of them again,
    mixed. Without those that are repeated, a reward model would not know that repeating is worth nothing."""
    share = draw.random()
    digits = [digit for digit in prompt[:-1] if draw.random() < share]
    digits += draw.choices(DIGITS, k=draw.randint(0 if digits else 1, 4))
    digits += draw.choices(digits, k=draw.randint(0, 4))
    draw.shuffle(digits)
    return "".join(digits) + "."


def demonstrations(seed: int) -> Iterator[dict[str, str]]:
    """Prompts with a reply that is as good or bad as it happens to be, without end."""
    draw = random.Random(f"preference demonstrations {seed}")
    while True:
        asked = prompt(draw)
        yield {"prompt": asked, "reply": reply(draw, asked)}


def pairs(seed: int) -> Iterator[dict[str, str]]:
    """Prompts with two replies, the truly better one chosen, without end."""
    draw = random.Random(f"preference pairs {seed}")
    while True:
        asked, both = prompt(draw), ["", ""]
        while abs(agreement(asked, both[0]) - agreement(asked, both[1])) < LEAST_DIFFERENCE:
            both = sorted((reply(draw, asked) for _ in range(2)), key=lambda text: agreement(asked, text))
        yield {"prompt": asked, "chosen": both[1], "rejected": both[0]}
