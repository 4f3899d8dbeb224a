"""Rewards on tool calls: reference cases, the papers' formulas, and text that is no tool call."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.rewards import make_reward
from megatron_rl.rewards.tool_calls import match_share
from megatron_rl.rewards.tool_parsers import parse_tool_calls

CASES = json.loads((Path(__file__).parent / "golden.json").read_text("utf-8"))
CALL = {"name": "a", "parameters": {"x": 1}}


def cases(function: str) -> list[Any]:
    found = [pytest.param(case["kwargs"], case["expected"], id=case["id"]) for case in CASES if case["fn"] == function]
    assert found
    return found


def completion(calls: list[dict[str, Any]] | None) -> str:
    lines = ["{broken"] if calls is None else [json.dumps(call) for call in calls]
    return "\n".join(["<think>t</think>", "<tool_call>", *lines, "</tool_call>"])


@pytest.mark.parametrize(("given", "expected"), cases("format_reward"))
def test_format_agrees_with_the_reference(given: dict[str, Any], expected: float) -> None:
    sample = {"tool_calls": [CALL] if given["need_tool"] else [], "needs_response": given["need_response"]}
    assert make_reward("tool_format", strict=given["strict"])(given["response"], sample) == expected


@pytest.mark.parametrize(("given", "expected"), cases("correctness_reward"))
def test_correctness_agrees_with_the_reference(given: dict[str, Any], expected: float) -> None:
    params = {key: given[key] for key in ("matching", "names", "same_name")}
    score = make_reward("tool_correctness", **params)(completion(given["pred"]), {"tool_calls": given["gold"]})
    assert score == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(("given", "expected"), cases("exec_score"))
def test_execution_agrees_with_the_reference(given: dict[str, Any], expected: float) -> None:
    score = make_reward("tool_exec")(completion(given["pred"]), {"tool_calls": given["gold"]})
    assert score == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(("given", "expected"), cases("parse_tool_calls"))
def test_calls_are_read_as_in_the_reference(given: dict[str, Any], expected: Any) -> None:
    assert parse_tool_calls(given["text"]) == expected


@pytest.mark.parametrize(
    ("calls", "response", "text"),
    [
        ([CALL], None, "<think>t</think>\n<tool_call>\n{}\n</tool_call>"),
        ([], None, "<think>t</think>\n<response>r</response>"),
        (None, None, "<think>t</think>\n<response>r</response>"),
        ([CALL], True, "<think>t</think>\n<tool_call>\n{}\n</tool_call>\n<response>r</response>"),
        (None, False, "<think>t</think>"),
    ],
)
def test_the_gold_answer_says_which_fields_are_wanted(calls: Any, response: bool | None, text: str) -> None:
    sample = {"tool_calls": calls, "needs_response": response}
    reward = make_reward("tool_format")
    assert reward(text, sample) == 1.0
    assert reward(f"\n {text}\n", sample) == 1.0  # white space around the whole is the chat template's business
    assert reward(f"{text} and so on", sample) == 0.0
    assert reward(text.replace("</think>\n", "</think>\n\n"), sample) == (1.0 if text == "<think>t</think>" else 0.0)
    assert make_reward("tool_format", strict=False)(text.replace("\n", ""), sample) == 1.0


def test_a_turn_that_calls_no_tool() -> None:
    for sample in ({"tool_calls": []}, {}):
        assert make_reward("tool_correctness")("<think>t</think>\n<response>r</response>", sample) == 3.0
        assert make_reward("tool_exec")("<think>t</think>\n<response>r</response>", sample) == 1.0
        assert make_reward("tool_correctness")(completion([CALL]), sample) == -3.0
        assert make_reward("tool_exec")(completion([CALL]), sample) == 0.0
        assert make_reward("tool_correctness")(completion(None), sample) == -3.0


def test_a_tag_that_is_only_thought_of_calls_nothing() -> None:
    text = completion([CALL]).replace("<think>t", "<think>I have to write <tool_call> first")
    assert parse_tool_calls(text) == [CALL]
    assert make_reward("tool_correctness")(text, {"tool_calls": [CALL]}) == 3.0
    assert make_reward("tool_format")(text, {"tool_calls": [CALL]}) == 0.0  # each tag once, as in the released code
    assert parse_tool_calls(f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>\n<think>t</think>") == [CALL]
    for thought in ("<think>no <tool_call> is needed</think>", "neither <tool_call> nor </tool_call></think>"):
        assert make_reward("tool_correctness")(f"{thought}\n<response>r</response>", {"tool_calls": []}) == 3.0
        assert make_reward("tool_exec")(f"{thought}\n<response>r</response>", {"tool_calls": [CALL]}) == 0.0
    for broken in (
        "<tool_call><think>t</think>",
        "<think>t</think></tool_call>",
        "<think><tool_call>",
        "</think><tool_call>",
    ):
        assert make_reward("tool_correctness")(broken, {"tool_calls": []}) == -3.0


@pytest.mark.parametrize("value", ["a\u2028b", "a\u2029b", "a\x85b"])  # line ends to Python, but not in JSON
def test_a_line_separator_within_a_string_does_not_end_the_call(value: str) -> None:
    gold = [{"name": "a", "parameters": {"x": value}}, CALL]
    raw = "\r\n".join(json.dumps(call, ensure_ascii=False) for call in gold)
    text = completion([]).replace("<tool_call>", f"<tool_call>\n{raw}")
    assert parse_tool_calls(text) == gold
    assert make_reward("tool_correctness")(text, {"tool_calls": gold}) == 3.0
    assert make_reward("api_bank")(text, {"tool_calls": gold}) == 1.0


@pytest.mark.parametrize(
    "block",
    [
        '{"name": "a"}',
        '{"parameters": {}}',
        '{"name": 1, "parameters": {}}',
        '{"name": "a", "parameters": [1]}',
        '[{"name": "a", "parameters": {}}]',
        '"a"',
        "null",
        '{"name": "a", "parameters": {}} {"name": "a", "parameters": {}}',
        "[" * 100_000,
        '{"name": "a", "parameters": {"x": ' + "9" * 5000 + "}}",
    ],
)
def test_what_is_no_call_cannot_be_read(block: str) -> None:
    text = f"<tool_call>\n{block}\n</tool_call>"
    assert parse_tool_calls(text) is None
    assert make_reward("tool_correctness")(text, {"tool_calls": [CALL]}) == -3.0
    assert make_reward("tool_exec")(text, {"tool_calls": [CALL]}) == 0.0


def test_odd_values_are_compared_and_never_raise() -> None:
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    gold = [{"name": "a", "parameters": {"x": deep, "y": float("nan")}}]
    assert make_reward("tool_correctness")(completion(gold), {"tool_calls": gold}) <= 3.0


def brute_force(table: list[list[float]]) -> float:
    rows, columns = len(table), len(table[0])
    if rows > columns:
        return brute_force([list(column) for column in zip(*table, strict=True)])
    return max(
        sum(table[row][column] for row, column in enumerate(chosen))
        for chosen in itertools.permutations(range(columns), rows)
    )


def random_calls(rng: random.Random, most: int) -> list[dict[str, Any]]:
    return [
        {"name": rng.choice("ab"), "parameters": {key: rng.randint(0, 1) for key in "xyz" if rng.random() < 0.6}}
        for _ in range(rng.randint(1, most))
    ]


def test_the_optimal_matching_is_the_best_of_all() -> None:
    rng = random.Random(0)
    better = 0
    for _ in range(400):
        gold, calls = random_calls(rng, 4), random_calls(rng, 5)
        largest = 1 + len(gold) + sum(len(call["parameters"]) for call in gold)
        pairs = [
            [
                0.0
                if want["name"] != call["name"]
                else 6 * match_share([want], [call], "greedy", "set") / 6 * (2 + len(want["parameters"])) - 1
                for call in calls
            ]
            for want in gold
        ]
        names = match_share(gold, [{**call, "name": call["name"] * 9} for call in calls], "optimal", "set")
        assert names == 0.0
        left, right = {call["name"] for call in gold}, {call["name"] for call in calls}
        expected = (len(left & right) / len(left | right) + brute_force(pairs)) / largest
        optimal = match_share(gold, calls, "optimal", "set")
        greedy = match_share(gold, calls, "greedy", "set")
        assert optimal == pytest.approx(expected, abs=1e-12)
        assert greedy <= optimal + 1e-12
        better += greedy < optimal - 1e-9
    assert better > 5  # the two differ, so the test can tell them apart


def test_a_thousand_calls_are_matched_in_time() -> None:
    calls = [{"name": "a", "parameters": {"x": i}} for i in range(1000)]
    score = make_reward("tool_correctness", matching="optimal")(completion(calls), {"tool_calls": calls[-3:]})
    assert math.isclose(score, 6 * (3 / 1000 + 6) / 7 - 3)


@pytest.mark.parametrize(
    ("said", "gold", "expected"), [("", [CALL], -3.0), ("", [], 3.0), ("<response>r</response>", [], 3.0)]
)
def test_a_block_in_the_thinking_is_no_call(said: str, gold: list[Any], expected: float) -> None:
    text = f"<think>\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>\n</think>\n{said}"
    assert make_reward("tool_correctness")(text, {"tool_calls": gold}) == expected
    assert make_reward("tool_exec")(text, {"tool_calls": gold}) == (expected + 3) / 6


def test_the_released_reward_s_zero_where_no_call_is_wanted() -> None:
    released = make_reward("tool_correctness", no_call_wanted="zero")
    for text in ("<think>t</think>\n<response>r</response>", completion([CALL]), completion(None)):
        assert released(text, {"tool_calls": []}) == 0.0
        assert released(text, {"tool_calls": [CALL]}) == make_reward("tool_correctness")(text, {"tool_calls": [CALL]})
    with pytest.raises(ValueError, match="no_call_wanted"):
        make_reward("tool_correctness", no_call_wanted="skip")


def test_remarks_name_the_part_of_a_call_that_is_wrong() -> None:
    def call(name: str, **parameters: object) -> dict[str, Any]:
        return {"name": name, "parameters": parameters}

    gold = [call("weather", city="Oslo", days=2, unit="C"), call("mail", to="ann"), call("walk", steps=3)]
    text = completion([call("mail", to="bob"), call("weather", city="Oslo", days=3, hours=1), call("buy")])
    for name in ("tool_correctness", "tool_exec", "tool_outcome"):
        assert make_reward(name).remarks(text, {"tool_calls": gold}) == [
            ("weather", True),
            ('  city: "Oslo"', True),
            ("  days: 3, wanted 2", False),
            ('  unit is missing, wanted "C"', False),
            ("  hours is no parameter that is wanted", False),
            ("mail", True),
            ('  to: "bob", wanted "ann"', False),
            ("walk is not called", False),
            ("buy is not wanted", False),
        ]
    reward = make_reward("tool_correctness")
    assert reward.remarks("hm <tool_call>", {"tool_calls": gold[2:]}) == [
        ("the calls cannot be read", False),
        ("walk is not called", False),
    ]
    assert reward.remarks("hello", {"tool_calls": []}) == [("no call, and none is wanted", True)]
    renamed = make_reward("tool_correctness", same_name=False).remarks(
        text.replace("weather", "wether"), {"tool_calls": gold[:1]}
    )
    assert renamed[0] == ("wether, wanted weather", False)
