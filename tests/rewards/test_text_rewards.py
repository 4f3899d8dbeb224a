"""Rewards on the text and its length: pattern, limit, working of a sum."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.rewards import make_reward
from megatron_rl.tasks.demonstrations import chain_sum_working

CASES = json.loads((Path(__file__).parent / "golden.json").read_text("utf-8"))
SUM = {"metadata": {"source_dataset": "chain_sum", "expression": "1 + 3 - 5 - 7"}}


@pytest.mark.parametrize(
    ("completion", "expected"),
    [("#-8", 1), ("1+3=4 4-5=-1#12", 1), ("12", 0), ("#1#2", 0), ("#", 0), ("#1 ", 0), ("a\nb#1", 1), ("", 0)],
)
def test_format_matches_the_whole_completion(completion: str, expected: float) -> None:
    reward = make_reward("format", pattern="[^#]*#-?[0-9]+")
    assert reward(completion, {}) == expected
    assert reward(completion, {"finish_reason": "length"}) == 0.0
    assert make_reward("format", pattern="[^#]*#-?[0-9]+", require_stop=False)(
        completion, {"finish_reason": "length"}
    ) == (expected)


@pytest.mark.parametrize("case", [case for case in CASES if case["fn"] == "length_reward"])
def test_length_agrees_with_the_reference(case: dict[str, Any]) -> None:
    reward = make_reward("length", limit=case["kwargs"]["limit"])
    assert [reward("", {"num_tokens": length}) for length in case["kwargs"]["length"]] == case["expected"]


def test_length_in_characters_and_without_a_count() -> None:
    reward = make_reward("length", limit=3, unit="characters")
    assert (reward("abc", {}), reward("abcd", {})) == (1.0, 0.0)
    with pytest.raises(ValueError, match="num_tokens"):
        make_reward("length", limit=3)("abc", {})


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("1+3=4 4-5=-1 -1-7=-8#-8", 1.0),
        ("1+3=4 4-5=-1 -1-7=-8#99", 1.0),  # the final answer is another reward's business
        ("#-8", 0.0),
        ("-8", 0.0),
        ("", 0.0),
        ("1+3=5 5-5=0 0-7=-7#-7", 2 / 3),  # one slip, carried on consistently
        ("1+3=4#4", 1 / 3),
        ("1+3=4 4-5=-1#-1", 2 / 3),
        ("1+3=4 4-5=-1 -1-7=-8 -8+0=-8#-8", 3 / 4),
        ("4-5=-1 1+3=4 -1-7=-8#-8", 0.0),
        ("1+3=4 nonsense -1-7=-8#-8", 1 / 3),  # nothing to start the third step from
        ("1+3=4 4+5=9 9-7=2#2", 2 / 3),  # wrong operator, carried on
        ("1+3=4 4-5=-1 -1-7=-8", 0.0),  # without the marker nothing is known to be working
    ],
)
def test_working_of_a_sum(completion: str, expected: float) -> None:
    assert make_reward("chain_sum_steps")(completion, SUM) == pytest.approx(expected)


def test_working_repeated_a_thousand_times_earns_little() -> None:
    working = " ".join(chain_sum_working("1 + 3 - 5 - 7"))
    assert make_reward("chain_sum_steps")(f"{working} " * 1000 + "#-8", SUM) == pytest.approx(1 / 1000)


def test_working_of_something_else_is_a_mistake_in_the_recipe() -> None:
    with pytest.raises(ValueError, match="restrict it with `tasks`"):
        make_reward("chain_sum_steps")("#1", {"metadata": {"source_dataset": "countdown"}})
    with pytest.raises(ValueError, match="marker must not be empty"):
        make_reward("chain_sum_steps", marker="")
