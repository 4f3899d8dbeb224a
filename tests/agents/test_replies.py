"""A turn's text as an assistant's message."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from megatron_rl.agents.rendering import Renderer
from megatron_rl.agents.replies import read_reply, turn_text
from megatron_rl.agents.template_remarks import unread_calls
from megatron_rl.rewards.tool_parsers import ParserName
from tests.agents.conversing import renderer_of
from tests.agents.families import FAMILIES, tokenizer_of

LOOK = {"name": "look", "arguments": {"what": "lamp"}}
HERMES = f"<tool_call>\n{json.dumps(LOOK)}\n</tool_call>"
TOOLRL = '<tool_call>\n{"name": "look", "parameters": {"what": "lamp"}}\n{"name": "go", "parameters": {}}\n</tool_call>'
LLAMA = '{"name": "look", "parameters": {"what": "lamp"}}'


def names(message: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message["tool_calls"]]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


@pytest.mark.parametrize(
    ("parser", "text", "calls", "content"),
    [
        ("hermes", f"First:\n{HERMES}\n{HERMES}", [("look", {"what": "lamp"})] * 2, "First:"),
        ("toolrl", f"<think>Hm.</think>\n{TOOLRL}", [("look", {"what": "lamp"}), ("go", {})], None),
        ("llama", LLAMA, [("look", {"what": "lamp"})], None),
        ("llama", f"So: <|python_tag|>{LLAMA}", [("look", {"what": "lamp"})], "So:"),
    ],
)
def test_calls_leave_the_content(parser: ParserName, text: str, calls: list[Any], content: str | None) -> None:
    reply = read_reply(text, "stop", parser, 3)
    assert names(reply.message) == calls
    assert reply.message["content"] == content
    assert (reply.finish_reason, reply.text, reply.unread) == ("tool_calls", text, False)


def test_ids_of_calls_are_of_nine_characters_and_say_turn_and_position() -> None:
    ids = [call["id"] for turn in (0, 12) for call in _calls(f"{HERMES}{HERMES}", turn)]
    assert ids == ["call00000", "call00001", "call01200", "call01201"]


def _calls(text: str, turn: int) -> list[Any]:
    calls: Any = read_reply(text, "stop", "hermes", turn).message["tool_calls"]
    return calls


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.", "Yes."),
        ("Hm.\n</think>\n\nYes.", True, "Hm.", "Yes."),
        ("<think>Hm.</think>Yes.", True, "Hm.", "Yes."),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("<think>Hm", False, "Hm", ""),
        ("Hm", True, "Hm", ""),
        ("Yes. <think>", False, None, "Yes. <think>"),
        ("Yes.\n", False, None, "Yes.\n"),
    ],
)
def test_thinking_is_apart_from_the_content(text: str, opened: bool, reasoning: str | None, content: str) -> None:
    message = read_reply(text, "stop", None, 0, opened).message
    assert message.get("reasoning_content") == reasoning
    assert message["content"] == content


def test_a_call_within_the_thinking_is_none() -> None:
    reply = read_reply(f"<think>{HERMES}</think>Yes.", "stop", "hermes", 0)
    assert "tool_calls" not in reply.message
    assert not reply.unread


@pytest.mark.parametrize("parser", ["hermes", "toolrl"])
def test_calls_that_cannot_be_read_stay_in_the_content(parser: ParserName) -> None:
    reply = read_reply("<tool_call>{", "stop", parser, 0)
    assert reply == ({"role": "assistant", "content": "<tool_call>{"}, "stop", "<tool_call>{", True)


def test_a_turn_that_was_cut_calls_nothing() -> None:
    reply = read_reply(HERMES, "length", "hermes", 0)
    assert reply == ({"role": "assistant", "content": HERMES}, "length", HERMES, False)


def test_without_a_parser_calls_are_content() -> None:
    assert read_reply(HERMES, "stop", None, 0).message["content"] == HERMES


def test_half_a_character_can_be_sent_in_arguments_and_not_in_a_name() -> None:
    half = '{"name": "look", "arguments": {"what": "\\ud83d é"}}'
    (call,) = _calls(f"<tool_call>{half}</tool_call>", 0)
    assert json.loads(call["function"]["arguments"].encode()) == {"what": "\ud83d é"}
    named = half.replace("look", "\\ud83d")
    assert read_reply(f"<tool_call>{named}</tool_call>", "stop", "hermes", 0).unread


def test_arguments_that_are_too_deep_for_their_readers_are_unread() -> None:
    for depth, unread in ((60, False), (900, True)):
        deep = '{"name": "look", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}"
        assert read_reply(f"<tool_call>{deep}</tool_call>", "stop", "hermes", 0).unread is unread


def test_the_text_of_a_turn_is_without_the_token_that_ended_it_and_with_all_others() -> None:
    tokenizer = tokenizer_of("llama3.1")
    ids = tokenizer("<|python_tag|>lamp  <|eom_id|>", add_special_tokens=False)["input_ids"]
    assert turn_text(tokenizer, ids, "stop") == "<|python_tag|>lamp  "
    assert turn_text(tokenizer, ids[:-1], "length") == "<|python_tag|>lamp  "


IDS = '[TOOL_CALLS][{"name": "look", "arguments": {}, "id": "ABCdef123"}, {"name": "go", "arguments": {}, "id": "%s"}]'


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (IDS % "ABCdef124", ["ABCdef123", "ABCdef124"]),
        (IDS % "ABCdef123", ["call00300", "call00301"]),
        (IDS % "short", ["call00300", "call00301"]),
        ("[TOOL_CALLS]go[CALL_ID]ABCdef123[ARGS]{}", ["ABCdef123"]),
        ("[TOOL_CALLS]go[ARGS]{}", ["call00300"]),
    ],
)
def test_calls_of_mistrals_models_keep_the_ids_that_these_drew(text: str, ids: list[str]) -> None:
    calls: Any = read_reply(text, "stop", "mistral", 3).message["tool_calls"]
    assert [call["id"] for call in calls] == ids


def test_gpt_oss_thinks_on_a_channel() -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    message = read_reply(f"{thought}<|channel|>final<|message|>Yes.", "stop", "gpt_oss", 0).message
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    called = f"{thought} to=functions.look<|channel|>commentary json<|message|>"
    reply = read_reply(called + '{"what": "lamp"}', "stop", "gpt_oss", 0)
    assert (reply.message["content"], reply.message["reasoning_content"]) == (None, "Hm.")
    assert names(reply.message) == [("look", {"what": "lamp"})]
    broken = read_reply(called + '{"what": ', "stop", "gpt_oss", 0)
    assert broken.unread
    assert broken.message["content"] == called + '{"what": '


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.parser is not None])
def test_what_the_template_writes_is_read_by_its_parser_and_no_other(name: str) -> None:
    renderer, parser = renderer_of(name), FAMILIES[name].parser
    assert parser is not None
    assert unread_calls(renderer, parser, True) is None
    assert unread_calls(renderer, "toolrl", True) is None
    if name == "plain":
        assert renderer.written_call() is None
        assert unread_calls(renderer, "none", True) is None
        return
    others = {"hermes", "llama", "mistral", "glm4", "qwen3_5", "deepseek", "gpt_oss"} - {parser}
    for other in (*others, "none"):
        said = unread_calls(renderer, other, True)
        assert said is not None
        assert said.startswith(f"`{other}` does not read calls")
        assert said.endswith(f"; `{parser}` does")
    assert unread_calls(renderer, "none", False) is None


def test_calls_in_a_format_of_their_own_have_no_parser() -> None:
    tokenizer = tokenizer_of("plain")
    calls = (
        "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    )
    copied = copy.copy(tokenizer)
    copied.chat_template = str(tokenizer.chat_template).replace("{{ m.content }}", "{{ m.content }}" + calls)
    said = unread_calls(Renderer(copied, {}), "hermes", True)
    written = 'CALL look({"what": "lamp"})'
    assert said == (
        f"`hermes` does not read calls as the chat template has them written, {written!r}; no parser does, so its calls "
        "stay in the text"
    )
