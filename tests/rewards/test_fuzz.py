"""Ten thousand completions nobody would write, per reward: a finite score in range, never an exception, and fast."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from megatron_rl.rewards import make_reward
from megatron_rl.rewards.registry import Reward

COUNT = 10_000
PER_SECOND = 1_000  # of CPU time, on one core

SUM: dict[str, Any] = {"answer": "-8", "metadata": {"source_dataset": "chain_sum", "expression": "1 + 3 - 5 - 7"}}
KNIGHTS: dict[str, Any] = {
    "answer": "Ava is a fool, and Aiden is a sage.",
    "metadata": {"source_dataset": "knights_knaves", "names": ["Ava", "Aiden"]},
}
TOOLS: dict[str, Any] = {
    "tool_calls": [
        {"name": "search", "parameters": {"query": "x", "limit": 3}},
        {"name": "search", "parameters": {"query": ["y"], "deep": {"a": None}}},
        {"name": "stop", "parameters": {}},
    ],
    "needs_response": True,
}
CALLS = "\n".join(json.dumps(call) for call in TOOLS["tool_calls"])
GOOD = [
    f"<think>t</think>\n<tool_call>\n{CALLS}\n</tool_call>\n<response>r</response>",
    f"<think>t</think>\nr\n<tool_call>\n{json.dumps(TOOLS['tool_calls'][0])}\n</tool_call>",
    f"r<|python_tag|>{CALLS}",
    CALLS,
    "1+3=4 4-5=-1 -1-7=-8#-8",
    "Ava is a fool, and Aiden is a sage.",
]
PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<response>", "</response>", "\n", "\n\n", " ", "#", "##"),
    *("<|python_tag|>", "<|eom_id|>", ";", '"arguments": {}'),
    *('{"name": "search", "parameters": {"query": "x"}}', '{"name": "stop"}', '"parameters": {}', "{", "}", "[", "]"),
    *('{"name": ["search"], "parameters": {}}', '{"name": "search", "parameters": null}', "null", "NaN", "-Infinity"),
    *('{"name": "search", "name": "stop", "parameters": {"limit": 1e999}}', "[" * 2000, '{"a":' * 500, "9" * 5000),
    *(
        "1+3=4",
        "4-5=-1",
        "-1-7=-8",
        "--8",
        "1e400",
        "\u0661",
        "\u00b2",
        "0x8",
        "-8",
        "8_0",
        "Infinity",
        "is a",
        "Ava",
        "and",
    ),
    *("\x00", "\ud800", "\u202e", "\U0001f600", "\\u0000", "\r\n", "\u2028", "\t", "\\", '"', "'"),
]

REWARDS = [
    ("tool_format", {}, TOOLS, (0, 1)),
    ("tool_format", {"strict": False}, TOOLS, (0, 1)),
    ("tool_correctness", {}, TOOLS, (-3, 3)),
    ("tool_correctness", {"matching": "optimal", "names": "set", "same_name": False}, TOOLS, (-3, 3)),
    ("tool_exec", {}, TOOLS, (0, 1)),
    ("tool_outcome", {"strict": False, "think": "opened"}, TOOLS, (0, 2)),
    ("tool_format", {"parser": "hermes"}, TOOLS, (0, 1)),
    ("tool_format", {"parser": "llama", "think": "none"}, TOOLS, (0, 1)),
    ("tool_correctness", {"parser": "hermes"}, TOOLS, (-3, 3)),
    ("tool_correctness", {"parser": "llama"}, TOOLS, (-3, 3)),
    ("rubric", {}, TOOLS, (0, 1)),
    ("format", {"pattern": "[^#]*#-?[0-9]+"}, {}, (0, 1)),
    ("length", {"limit": 100, "unit": "characters"}, {}, (0, 1)),
    ("chain_sum_steps", {}, SUM, (0, 1)),
    ("puzzle", {"after": "#", "partial": True}, SUM, (0, 1)),
    ("puzzle", {"partial": True}, SUM, (0, 1)),
    ("puzzle", {"partial": True}, KNIGHTS, (0, 1)),
]


def completions(count: int) -> list[str]:
    rng = random.Random(0)
    made = []
    for _ in range(count):
        if rng.random() < 0.5:
            text = "".join(rng.choices(PIECES, k=rng.randint(0, 12)))
        else:  # a good one, damaged
            text = rng.choice(GOOD)
            for _ in range(rng.randint(1, 4)):
                at, width = rng.randint(0, len(text)), rng.randint(0, 9)
                text = text[:at] + rng.choice(["", *PIECES[:20], chr(rng.randint(0, 0x2FF))]) + text[at + width :]
        made.append(text)
    return made


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return completions(COUNT)


@pytest.mark.parametrize(("name", "params", "sample", "bounds"), REWARDS, ids=lambda value: str(value)[:30])
def test_ten_thousand_completions(
    name: str, params: dict[str, Any], sample: dict[str, Any], bounds: tuple[float, float], texts: list[str]
) -> None:
    reward: Reward = make_reward(name, **params)
    reward(texts[0], sample)  # imports
    start = time.process_time()
    scores = [reward(text, sample) for text in texts]
    seconds = time.process_time() - start
    assert all(isinstance(score, float) and bounds[0] <= score <= bounds[1] for score in scores)
    assert len(set(scores)) > 1  # the texts are not all the same to it
    assert COUNT / seconds > PER_SECOND


@pytest.mark.parametrize(("name", "params", "sample", "bounds"), REWARDS, ids=lambda value: str(value)[:30])
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
