"""A turn of the policy as an assistant's message of OpenAI's form."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from megatron_rl.data.sample import Call, Message
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.rewards.template_calls import mistral_ids, read_harmony
from megatron_rl.rewards.tool_parsers import (
    APART,
    CLOSE,
    OPEN,
    THINK,
    THOUGHT,
    ParserName,
    Tools,
    calls_apart,
    read_calls,
)

_DEEPEST = 64  # levels of a call's arguments
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can write half a character, which no text encoding has


class Reply(NamedTuple):
    """The answer to a client's request."""

    message: Message  # role, content, and where there are any `reasoning_content` and `tool_calls`
    finish_reason: str  # stop | length | tool_calls
    text: str  # the turn as the model wrote it, which rewards read
    unread: bool  # it has calls that cannot be read; they are left in the content


def turn_text(tokenizer: Tokenizer, ids: Sequence[int], finish_reason: str) -> str:
    """The text of a turn's tokens, special ones among them, without the one that ended it."""
    drawn = ids[:-1] if finish_reason == "stop" else ids
    return tokenizer.decode(drawn, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def read_reply(
    text: str,
    finish_reason: str,
    parser: ParserName | None,
    turn: int,
    thinking: bool = False,
    tools: Tools | None = None,
) -> Reply:
    """A turn's text as a message.

    Args:
        finish_reason: stop | length. A turn that was cut has no calls: what it wrote is content.
        parser: of tool calls; None: they stay in the content.
        turn: number of the turn in its conversation, from 0; ids of calls are made of it and their position, unless the model
            wrote them, as Mistral's do.
        thinking: the prompt ends with `<think>`: the text begins within the thinking.
        tools: of the prompt, see `read_calls`.
    """
    reasoning, content = _thinking_apart(text, thinking)
    with_calls = content
    if parser == "gpt_oss":
        reasoning, content, _ = read_harmony(text)
        with_calls = text
    calls = read_calls(with_calls, parser, tools) if parser is not None and finish_reason == "stop" else []
    unread = calls is None or not all(map(_can_be_sent, calls))
    message: Message = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls and not unread:
        assert parser is not None
        message["content"] = _without_calls(with_calls, parser) or None
        ids = mistral_ids(with_calls) if parser == "mistral" else []
        ids = ids or [f"call{turn:03d}{position:02d}" for position in range(len(calls))]
        message["tool_calls"] = list(map(_call, calls, ids))
        finish_reason = "tool_calls"
    return Reply(message, finish_reason, text, unread)


def _thinking_apart(text: str, thinking: bool) -> tuple[str | None, str]:
    """The text within `<think>`, None where there is none, and what follows it."""
    before, opened, rest = text.partition(THINK)
    if opened and not before.strip():
        thinking, text = True, rest
    if not thinking:
        return None, text
    reasoning, _, said = text.partition(THOUGHT)
    return reasoning.strip("\n"), said.lstrip("\n")


def _without_calls(content: str, parser: ParserName) -> str:
    """The text around the calls of a message."""
    if parser == "llama":
        return calls_apart(content)[0].strip()
    if parser in APART:
        return APART[parser](content)[0].strip()
    pieces = content.split(OPEN)
    return "".join([pieces[0], *(piece.partition(CLOSE)[2] for piece in pieces[1:])]).strip()


def _can_be_sent(call: Call) -> bool:
    """Whether a name is text that UTF-8 has, and arguments are no deeper than those who read them can go, with numbers that
    JSON has: Python reads NaN, and no other language does."""
    level: list[object] = [call["parameters"]]
    for _ in range(_DEEPEST):
        level = [item for value in level for item in _items(value)]
        if any(isinstance(value, float) and not math.isfinite(value) for value in level):
            return False
    return not level and not _SURROGATE.search(call["name"])


def _items(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _call(call: Call, identifier: str) -> dict[str, object]:
    arguments = json.dumps(call["parameters"], ensure_ascii=False)
    if _SURROGATE.search(arguments):
        arguments = json.dumps(call["parameters"])
    function = {"name": call["name"], "arguments": arguments}
    return {"id": identifier, "type": "function", "function": function}
