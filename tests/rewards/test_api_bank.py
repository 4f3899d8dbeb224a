"""API-Bank's accuracy: the gold call, exactly. The cases are made up, in ToolRL's format."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_rl.rewards import make_reward

GOLD = {"name": "BookTable", "parameters": {"restaurant": "Blue Door", "guests": "4", "date": "2023-05-02"}}
SAMPLE: dict[str, Any] = {"tool_calls": [GOLD]}


def completion(*calls: Any) -> str:
    lines = "\n".join(call if isinstance(call, str) else json.dumps(call) for call in calls)
    return f"<think> The user wants a table. </think>\n<tool_call>\n{lines}\n</tool_call>"


def changed(**parameters: Any) -> dict[str, Any]:
    return {"name": GOLD["name"], "parameters": {**GOLD["parameters"], **parameters}}


OTHER = {"name": "CancelTable", "parameters": {"restaurant": "Blue Door"}}


@pytest.mark.parametrize(
    ("text", "found", "alone"),
    [
        (completion(GOLD), 1, 1),
        (completion({"parameters": dict(reversed(GOLD["parameters"].items())), "name": "BookTable"}), 1, 1),
        (completion(OTHER, GOLD), 1, 0),
        (completion(GOLD, OTHER), 1, 0),
        (completion("nonsense", GOLD), 1, 0),
        (completion(GOLD["parameters"]), 1, 0),
        (completion(GOLD).replace("</tool_call>", ""), 1, 0),
        (completion(OTHER), 0, 0),
        (completion(changed(guests=4)), 0, 0),
        (completion(changed(guests="5")), 0, 0),
        (completion(changed(name="Ada")), 0, 0),
        (completion({"name": "BookTable", "parameters": {"restaurant": "Blue Door"}}), 0, 0),
        (completion({"name": "BookTable", "parameters": "Blue Door"}), 0, 0),
        (completion({**GOLD, "name": "booktable"}), 0, 0),
        (completion("[" * 100_000), 0, 0),
        (completion("7", "null", "[]", '"text"'), 0, 0),
        ("<think> x </think>\n<response> Done. </response>", 0, 0),
        ("", 0, 0),
    ],
)
def test_only_the_gold_call_counts(text: str, found: float, alone: float) -> None:
    assert make_reward("api_bank")(text, SAMPLE) == found
    assert make_reward("api_bank", calls="only")(text, SAMPLE) == alone


def test_a_sample_without_a_gold_call_is_refused() -> None:
    with pytest.raises(ValueError, match="tool_calls"):
        make_reward("api_bank")("", {"tool_calls": []})
