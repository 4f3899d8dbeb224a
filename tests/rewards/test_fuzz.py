"""Ten thousand completions nobody would write, per reward: a finite score in range, never an exception, and fast."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from megatron_rl.rewards import Reward, make_reward
from megatron_rl.rewards.isolation import IsolatedReward
from tests.fuzz import completions as fuzz

COUNT = 10_000
PER_SECOND = 1_000  # of CPU time, on one core


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return list(islice(fuzz.texts(random.Random(0)), COUNT))


@pytest.mark.parametrize(("name", "params", "sample", "bounds"), fuzz.REWARDS, ids=lambda value: str(value)[:30])
def test_ten_thousand_completions(
    name: str, params: dict[str, Any], sample: dict[str, Any], bounds: tuple[float, float], texts: list[str]
) -> None:
    reward: Reward = make_reward(name, **params)
    assert reward.bounds == bounds
    reward(texts[0], sample)  # imports
    start = time.process_time()
    scores = [reward(text, sample) for text in texts]
    seconds = time.process_time() - start
    assert all(isinstance(score, float) and bounds[0] <= score <= bounds[1] for score in scores)
    assert len(set(scores)) > 1  # the texts are not all the same to it
    assert COUNT / seconds > PER_SECOND


@pytest.mark.parametrize(("name", "params", "sample", "bounds"), fuzz.REWARDS, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize(
    "unit",
    [
        "</think>\n<tool_call>\n",
        "<think>",
        '{"name": "search", "parameters": {"query": "x", "limit": 3}}\n',
        "[",
        "1+3=4 ",
        "#-8",
        "<|eot_id|> ",
        "9",
        " is a ",
    ],
    ids=range(9),
)
def test_a_hundred_kilobytes_of_garbage(
    unit: str, name: str, params: dict[str, Any], sample: dict[str, Any], bounds: tuple[float, float]
) -> None:
    text = unit * (100_000 // len(unit))
    reward = make_reward(name, **params)
    start = time.process_time()
    for garbage in (text, f"<think>t</think>\n<tool_call>\n{text}\n</tool_call>\n<response>r</response>"):
        score = reward(garbage, sample)
        assert isinstance(score, float)
        assert bounds[0] <= score <= bounds[1]
    assert time.process_time() - start < 3


@pytest.fixture(scope="module")
def graders() -> Iterator[tuple[IsolatedReward, IsolatedReward]]:
    lenient, strict = fuzz.graders(timeout_seconds=20)
    yield lenient, strict
    for reward in (lenient, strict):
        reward.isolated.close()


def test_scraps_of_latex(graders: tuple[IsolatedReward, IsolatedReward]) -> None:
    """Both graders take any text, and what strict grading accepts lenient grading accepts."""
    found = []
    for gold, completion in islice(fuzz.solutions(random.Random(0)), 100):
        if (said := fuzz.maths_fault(*graders, gold, completion)) is not None:
            found.append((gold, completion, said))
    assert not found
