"""Messages as clients send them: read into one form, and compared by meaning."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import cast

from megatron_rl.data.sample import Message

_ROLES_BY_ID = ("tool_call_id", "name")
_HALF = re.compile("[\ud800-\udfff]")
_SHOWN = 80  # characters of a value in a message


def read_messages(sent: Sequence[Mapping[str, object]]) -> list[Message]:
    """Messages without the keys that say nothing, and with a text where the content is a list of texts.

    Raises:
        ValueError: one has no role, or a content that is none.
    """
    return [_read(message, f"messages[{i}]") for i, message in enumerate(sent)]


def _read(sent: Mapping[str, object], where: str) -> Message:
    if not isinstance(sent, Mapping) or not isinstance(sent.get("role"), str):
        raise ValueError(f"{where} is {sent!r:.{_SHOWN}}, and needs a role: system, user, assistant or tool")
    message = {key: value for key, value in sent.items() if value is not None and value != []}
    message["content"] = _read_content(message.get("content", ""), where)
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list | tuple):
        raise ValueError(f"{where}.tool_calls is {calls!r:.{_SHOWN}}, and must be a list")
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where} has a tool call {call!r:.{_SHOWN}}, and it needs function.name")
    return message


def _read_content(content: object, where: str) -> object:
    """The text of a content; a list where it has more than texts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) and "type" in part for part in content):
        raise ValueError(f"{where}.content is {content!r:.{_SHOWN}}, and must be a text or a list of parts with a type")
    if all(part["type"] == "text" and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    return list(content)


def difference(sent: Message, recorded: Message) -> str | None:
    """Says in what a message means something else than a recorded one; None: in nothing.

    Clients leave out `reasoning_content`, write the JSON of arguments anew and strip white space around the assistant's text:
    none of it is a difference, because the tokens are the recorded ones. Ids and names are compared where both have them.
    """
    meanings = {"its role": [sent["role"], recorded["role"]]}
    strip = recorded["role"] == "assistant"
    meanings["its content"] = [_text(message, strip) for message in (sent, recorded)]
    meanings["what it calls"] = [_calls(message) for message in (sent, recorded)]
    for key in _ROLES_BY_ID:
        if key in sent and key in recorded:
            meanings[f"its {key}"] = [sent[key], recorded[key]]
    for name, (theirs, ours) in meanings.items():
        if theirs not in (ours, whole_characters(ours)):
            return f"{name} is {theirs!r:.{_SHOWN}}, and was {ours!r:.{_SHOWN}}"
    return None


def _text(message: Message, strip: bool) -> object:
    content = message["content"]
    return content.strip() if strip and isinstance(content, str) else content


def _calls(message: Message) -> list[tuple[object, object]]:
    """Names and arguments of a message's calls."""
    functions = [call["function"] for call in cast(Sequence[Mapping[str, Message]], message.get("tool_calls", ()))]
    return [(function["name"], arguments_of(function)) for function in functions]


def arguments_of(function: Mapping[str, object]) -> object:
    """A call's arguments as a value; the text where it is not JSON. No text means no arguments."""
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def whole_characters(value: object) -> object:
    """A value of JSON in whose texts no character is half. The policy may write such, which some clients cannot read."""
    if isinstance(value, str):
        return _HALF.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {str(whole_characters(key)): whole_characters(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(whole_characters, value))
    return value


def same_tools(some: Sequence[object] | None, others: Sequence[object] | None) -> bool:
    """Whether tools are the same, whatever the order of keys, and with or without keys that have no value.

    `strict`, by which a server would hold the model to a function's schema, is none of it: the policy is held to nothing.
    """
    return [*map(_tool, some or [])] == [*map(_tool, others or [])]


def _tool(tool: object) -> object:
    if isinstance(tool, Mapping) and isinstance(function := tool.get("function"), Mapping):
        tool = {**tool, "function": {key: value for key, value in function.items() if key != "strict"}}
    return _plain(tool)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
