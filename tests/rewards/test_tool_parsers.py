"""Tool calls as Qwen's (hermes) and Llama's chat templates have them written: reading, correctness, format."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.rewards import make_reward
from megatron_rl.rewards.tool_parsers import PARSERS, hermes_calls, llama_calls

A: dict[str, Any] = {"name": "add", "parameters": {"x": 1, "y": ["</think>", None]}}
B: dict[str, Any] = {"name": "stop", "parameters": {}}
JSON_A, JSON_B = (json.dumps(call).replace("</think>", "end") for call in (A, B))
A["parameters"]["y"][0] = "end"
HERMES_A = f"<tool_call>\n{JSON_A.replace('parameters', 'arguments')}\n</tool_call>"
HERMES_B = f"<tool_call>{JSON_B}</tool_call>"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("It is 3.", []),
        ("", []),
        (HERMES_A, [A]),
        (f"I add.\n{HERMES_A}\n{HERMES_B}", [A, B]),
        (f"<think>\nshould I <tool_call>?\n</think>\n\n{HERMES_A}", [A]),
        (f"<tool_call>{JSON_A}", None),
        (f"{JSON_A}</tool_call>", None),
        (f"{HERMES_A}</tool_call>", None),
        (f"<tool_call>{HERMES_A}</tool_call>", None),
        (f"<tool_call>\n{JSON_A}\n{JSON_B}\n</tool_call>", None),
        ("<tool_call>\n</tool_call>", None),
        ('<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', None),
        ('<tool_call>{"name": ["add"], "arguments": {}}</tool_call>', None),
    ],
)
def test_hermes(text: str, calls: Any) -> None:
    assert hermes_calls(text) == calls


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("It is 3.", []),
        ("", []),
        (JSON_A, [A]),
        (f"<|python_tag|>{JSON_A}<|eom_id|>", [A]),
        (f"Let me see. <|python_tag|>{JSON_A}; {JSON_B}<|eot_id|>\n", [A, B]),
        (f"\n{JSON_A}\n{JSON_B}", [A, B]),
        (f"[{JSON_A}, {JSON_B}]", [A, B]),
        (JSON_A.replace("parameters", "arguments"), [A]),
        (f"<think>{JSON_B}</think>{JSON_A}", [A]),
        ("[1] is the first footnote.", []),
        ("{", None),
        (f"{JSON_A} and more", None),
        ("<|python_tag|>", None),
        ("<|python_tag|>print(1)", None),
        ('{"answer": 3}', None),
        ('[{"name": "add", "parameters": {}}, 3]', None),
    ],
)
def test_llama(text: str, calls: Any) -> None:
    assert llama_calls(text) == calls


@pytest.mark.parametrize(
    ("parser", "right", "twice", "other"),
    [
        ("hermes", HERMES_A, HERMES_A * 2, HERMES_B),
        ("llama", JSON_A, f"{JSON_A};{JSON_A}", JSON_B),
    ],
)
def test_scores_are_those_of_the_calls_whatever_the_format(parser: str, right: str, twice: str, other: str) -> None:
    sample = {"tool_calls": [A]}
    correct, execution = (make_reward(name, parser=parser) for name in ("tool_correctness", "tool_exec"))
    assert correct(right, sample) == 3.0
    assert execution(right, sample) == 1.0
    assert correct(other, sample) == correct("nothing", sample) == -3.0
    assert correct("nothing", {"tool_calls": []}) == 3.0
    reference = make_reward("tool_correctness")
    tagged = "<think>t</think>\n<tool_call>\n{}\n</tool_call>"
    assert correct(twice, sample) != 3.0
    assert correct(twice, sample) == reference(tagged.format(f"{JSON_A}\n{JSON_A}"), sample)


FORMATS = [  # parser, calls, response, text
    ("hermes", True, False, f"{HERMES_A}\n{HERMES_B}"),
    ("hermes", True, True, f"I add.\n{HERMES_A}"),
    ("hermes", False, True, "It is 3."),
    ("llama", True, False, f"{JSON_A}; {JSON_B}<|eom_id|>"),
    ("llama", True, False, f"<|python_tag|>{JSON_A}"),
    ("llama", True, True, f"I add.<|python_tag|>{JSON_A}"),
    ("llama", False, True, "It is 3."),
]


@pytest.mark.parametrize(("parser", "calls", "response", "text"), FORMATS)
def test_the_fields_that_are_wanted_and_no_others(parser: str, calls: bool, response: bool, text: str) -> None:
    for has_calls, has_response in ((True, False), (True, True), (False, True)):
        sample = {"tool_calls": [A] if has_calls else [], "needs_response": has_response}
        fits = (has_calls, has_response) == (calls, response)
        assert make_reward("tool_format", parser=parser, think="none")(text, sample) == fits
        assert make_reward("tool_format", parser=parser)(f"<think>t</think>\n{text}", sample) == fits
        assert make_reward("tool_format", parser=parser, think="opened")(f"t</think>{text}", sample) == fits


@pytest.mark.parametrize(("parser", "calls", "response", "text"), FORMATS)
def test_thinking_where_it_should_be(parser: str, calls: bool, response: bool, text: str) -> None:
    sample = {"tool_calls": [A] if calls else [], "needs_response": response}
    wrong = {
        "required": (text, f"t</think>{text}", f"a<think>t</think>{text}", f"<think><think>t</think>{text}"),
        "opened": (text, f"<think>t</think>{text}", f"t</think></think>{text}"),
        "none": (f"<think>t</think>{text}", f"</think>{text}"),
    }
    for think, texts in wrong.items():
        reward = make_reward("tool_format", parser=parser, think=think)
        assert [reward(wrong_text, sample) for wrong_text in texts] == [0.0] * len(texts)


@pytest.mark.parametrize("text", [f"{HERMES_A} done", f"{HERMES_A} then {HERMES_B}", f"{HERMES_A}</tool_call>"])
def test_nothing_stands_between_or_behind_hermes_calls(text: str) -> None:
    for response in (False, True):
        sample = {"tool_calls": [A, B], "needs_response": response}
        assert make_reward("tool_format", parser="hermes", think="none")(text, sample) == 0.0


def test_toolrls_fields_with_thinking_begun_in_the_prompt_or_without() -> None:
    sample = {"tool_calls": [A]}
    block = f"<tool_call>\n{JSON_A}\n</tool_call>"
    assert make_reward("tool_format", think="opened")(f"t</think>\n{block}", sample) == 1.0
    assert make_reward("tool_format", think="none")(block, sample) == 1.0
    assert make_reward("tool_format", think="none")(f"<think>t</think>\n{block}", sample) == 0.0
    assert make_reward("tool_format", think="opened")(block, sample) == 0.0


def test_the_outcome_is_form_and_calls_together() -> None:
    sample = {"tool_calls": [A]}
    reward = make_reward("tool_outcome")
    block = f"<tool_call>\n{JSON_A}\n</tool_call>"
    assert reward(f"<think>t</think>\n{block}", sample) == 2.0
    assert reward(block, sample) == 1.0
    assert reward("<think>t</think>\n<tool_call>\n{\n</tool_call>", sample) == 1.0
    assert reward("{", sample) == 0.0


@pytest.mark.parametrize("name", ["tool_format", "tool_correctness", "tool_exec", "tool_outcome"])
def test_an_unknown_parser_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=r"`parser` must be one of toolrl, hermes, llama.*; it is 'qwen'"):
        make_reward(name, parser="qwen")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.fixed_dictionaries({"name": st.text(max_size=6), "parameters": st.dictionaries(st.text(max_size=4), VALUES)}),
    min_size=1,
    max_size=3,
)


@settings(max_examples=100, deadline=None)
@given(CALLS)
def test_what_is_written_is_read_back(calls: list[dict[str, Any]]) -> None:
    lines = [json.dumps(call).replace("<", "\\u003c") for call in calls]
    written = {
        "toolrl": "<tool_call>\n" + "\n".join(lines) + "\n</tool_call>",
        "hermes": "\n".join(f"<tool_call>\n{line}\n</tool_call>" for line in lines),
        "llama": "; ".join(lines),
    }
    for parser, text in written.items():
        assert PARSERS[parser](text) == calls
