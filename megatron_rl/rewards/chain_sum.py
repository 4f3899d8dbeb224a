"""A process reward for chain_sum: how much of the written working is right."""

from __future__ import annotations

import re
from itertools import zip_longest

from megatron_rl.rewards.kinds import UNIT, InlineReward, SampleMapping
from megatron_rl.rewards.registry import register_reward

_STEP = re.compile(r"(-?\d{1,18})([+-])(-?\d{1,18})=(-?\d{1,18})")


@register_reward("chain_sum_steps")
def chain_sum_steps(marker: str = "#") -> InlineReward:
    """Share of correct steps in the working of a chain_sum answer, in [0, 1]; 0 where no working is shown.

    The working is the text before the last `marker`: steps separated by blanks, such as `1+3=4 4-5=-1`. Step i is correct
    where it starts from the previous step's written result (the first from the sum's first term), uses the sum's i-th
    operator and term, and its arithmetic is right; so an early slip is not counted again in later steps. Missing and surplus
    steps count as wrong. A deterministic rubric, without a model.

    Args:
        marker: what separates the working from the final answer.
    """
    if not marker:
        raise ValueError("marker must not be empty")

    def expression_of(sample: SampleMapping) -> str:
        metadata = sample.get("metadata") or {}
        if metadata.get("source_dataset") != "chain_sum":
            raise ValueError("chain_sum_steps scores reasoning-gym's chain_sum only; restrict it with `tasks`")
        return str(metadata["expression"])

    def score(completion: str, sample: SampleMapping) -> float:
        return score_working(completion.rpartition(marker)[0], expression_of(sample))

    return InlineReward(score, bounds=UNIT, check_sample=expression_of)


def score_working(working: str, expression: str) -> float:
    """The share of correct steps. `expression` has blanks around its operators, as in `1 + 3 - 5`."""
    first, *rest = expression.split()
    expected = list(zip(rest[::2], rest[1::2], strict=True))
    written = working.split()
    if not expected or not written:
        return 0.0
    running: int | None = int(first)
    correct = 0
    for step, target in zip_longest(written, expected):
        match = _STEP.fullmatch(step) if step else None
        if match is None:
            running = None
            continue
        left, operator, term, result = int(match[1]), match[2], int(match[3]), int(match[4])
        total = left + term if operator == "+" else left - term
        if target is not None and left == running and (operator, term) == (target[0], int(target[1])):
            correct += total == result
        running = result
    return correct / max(len(expected), len(written))
