"""Completions that a model hardly writes, for the rewards that read text: a finite score in range, no exception, in time.

    python -m tests.fuzz.completions --seconds 600 [--seed 1]

`tests/rewards/test_fuzz.py` runs the same generator on a fixed number of texts.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

from megatron_rl.rewards import Reward, make_reward
from megatron_rl.rewards.isolation import IsolatedReward
from megatron_rl.rewards.tool_parsers import APART

SLOW = 5.0  # seconds of CPU time of one call in this process; a score takes microseconds, a text of 100 kB milliseconds

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
    '[TOOL_CALLS]search[ARGS]{"query": "x", "limit": 3}',
    "<tool_call>search<arg_key>query</arg_key><arg_value>x</arg_value><arg_key>limit</arg_key><arg_value>3</arg_value></tool_call>",
    "<tool_call><function=search><parameter=query>x</parameter><parameter=limit>3</parameter></function></tool_call>",
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{"query": "x"}<｜tool▁call▁end｜>',
    '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "x", "limit": 3}',
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
    *(
        "<arg_key>",
        "</arg_value>",
        "<function=search>",
        "</parameter>",
        "[TOOL_CALLS]",
        "<|channel|>final",
        "<|message|>",
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
    *(("tool_outcome", {"parser": parser, "think": "none"}, TOOLS, (0, 2)) for parser in APART),
    ("rubric", {}, TOOLS, (0, 1)),
    ("format", {"pattern": "[^#]*#-?[0-9]+"}, {}, (0, 1)),
    ("length", {"limit": 100, "unit": "characters"}, {}, (0, 1)),
    ("chain_sum_steps", {}, SUM, (0, 1)),
    ("puzzle", {"after": "#", "partial": True}, SUM, (0, 1)),
    ("puzzle", {"partial": True}, SUM, (0, 1)),
    ("puzzle", {"partial": True}, KNIGHTS, (0, 1)),
]

LATEX = [
    *(
        "\\boxed{",
        "\\boxed",
        "\\fbox{",
        "}",
        "{",
        "$",
        "$$",
        "\\(",
        "\\)",
        "\\[",
        "\\]",
        "\\{",
        "\\}",
        ",",
        ", ",
        "=",
        "\\\\",
    ),
    *(
        "\\frac",
        "\\frac12",
        "\\dfrac{1}{2}",
        "\\sqrt",
        "\\sqrt{x",
        "\\text{",
        "\\text{ cm}",
        "\\text{ or }",
        "\\pm",
        "\\infty",
        "\\gamma",
    ),
    *(
        "27",
        "-8",
        "0.5",
        "1,234",
        "1e400",
        "1e-400",
        "7e37",
        "9^{9^{9}}",
        "x^2",
        "x_{1}",
        "4210_5",
        "50\\%",
        "%",
        "^\\circ",
        "\\cdot 10^{",
    ),
    *(
        "(0,1)",
        "[0,1)",
        "\\{1,2\\}",
        "(",
        "]",
        "\\cup",
        "<",
        "\\le",
        "x \\in ",
        "\\begin{pmatrix}",
        "&",
        "\\end{pmatrix}",
        "million",
        "apples",
    ),
    *(
        "The answer is ",
        "#### 27",
        "</think>",
        "<think>",
        "or",
        "and",
        ".",
        " ",
        "\n",
        "\x00",
        "\ud800",
        "\u0661",
        "\u2212",
        "5" * 3000,
        "(" * 300,
    ),
]
GOLDS = [
    "27",
    "-8",
    "\\frac{1}{2}",
    "7.25e22",
    "(0,1)",
    "\\{1,2\\}",
    "x^2+1",
    "4210_5",
    "50\\%",
    "\\text{east}",
    "m(\\gamma^2-1)",
    "v = \\boxed{1e6}",
]


def texts(rng: random.Random) -> Iterator[str]:
    """Pieces of the formats in any order, and good completions damaged in a few places; without end."""
    while True:
        if rng.random() < 0.5:
            yield "".join(rng.choices(PIECES, k=rng.randint(0, 12)))
            continue
        text = rng.choice(GOOD)
        for _ in range(rng.randint(1, 4)):
            at, width = rng.randint(0, len(text)), rng.randint(0, 9)
            text = text[:at] + rng.choice(["", *PIECES[:20], chr(rng.randint(0, 0x2FF))]) + text[at + width :]
        yield text


def solutions(rng: random.Random) -> Iterator[tuple[str, str]]:
    """(gold answer, completion): scraps of LaTeX, in a box or not; without end."""
    while True:
        inside = "".join(rng.choices(LATEX, k=rng.randint(0, 6)))
        if rng.random() < 0.3:
            inside = rng.choice(GOLDS) + inside
        yield rng.choice(GOLDS), f"so \\boxed{{{inside}}}." if rng.random() < 0.7 else inside


def fault(reward: Reward, completion: str, sample: dict[str, Any], bounds: tuple[float, float]) -> str | None:
    """What is wrong with a reward's score of a completion; None where nothing is."""
    start = time.process_time()
    try:
        score = reward(completion, sample)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if not isinstance(score, float) or not math.isfinite(score) or not bounds[0] <= score <= bounds[1]:
        return f"it scores {score!r}"
    seconds = time.process_time() - start
    return f"it takes {seconds:.1f} s" if seconds > SLOW else None


def graders(**params: Any) -> tuple[IsolatedReward, IsolatedReward]:
    """The lenient and the strict grader."""
    lenient, strict = make_reward("math", **params), make_reward("math", strict=True, **params)
    assert isinstance(lenient, IsolatedReward)
    assert isinstance(strict, IsolatedReward)
    return lenient, strict


def maths_fault(lenient: IsolatedReward, strict: IsolatedReward, gold: str, completion: str) -> str | None:
    """What is wrong with the two graders' scores: a fault of one, or a strictly right answer that is leniently wrong."""
    sample = {"answer": gold}
    for reward in (strict, lenient):
        if (said := fault(reward, completion, sample, (0, 1))) is not None:
            return said
    stopped = _timeouts(lenient, strict)
    differ = strict(completion, sample) == 1 and lenient(completion, sample) == 0
    return (
        "strict grading accepts what lenient grading does not"
        if differ and _timeouts(lenient, strict) == stopped
        else None
    )


def _timeouts(*rewards: IsolatedReward) -> int:
    return sum(reward.isolated.timeouts for reward in rewards)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default: 60)")
    parser.add_argument("--seed", type=int, default=None, help="of the first text; default: the clock's")
    args = parser.parse_args()
    seed = time.time_ns() % 1_000_000_007 if args.seed is None else args.seed
    rewards = [
        (f"{name} {params}", make_reward(name, **params), sample, bounds) for name, params, sample, bounds in REWARDS
    ]
    lenient, strict = graders()
    rng, count, faults = random.Random(seed), 0, 0
    writings, maths = texts(rng), solutions(rng)
    deadline = time.monotonic() + args.seconds
    while time.monotonic() < deadline:
        text, (gold, solution) = next(writings), next(maths)
        found = [
            (name, text, said)
            for name, reward, sample, bounds in rewards
            if (said := fault(reward, text, sample, bounds))
        ]
        if (said := maths_fault(lenient, strict, gold, solution)) is not None:
            found.append((f"math, gold {gold!r}", solution, said))
        for name, completion, said in found:
            print(f"{name}: {said}: {completion!r}", flush=True)
        count, faults = count + 1, faults + len(found)
    print(f"seed {seed}: {count} texts for {len(rewards) + 2} rewards: {faults} faults", end="; ")
    print(f"{_timeouts(lenient, strict)} comparisons stopped by their deadline")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
