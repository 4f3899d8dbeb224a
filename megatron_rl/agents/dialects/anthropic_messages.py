"""Anthropic's messages: a conversation of the user's and the assistant's blocks, with the system's text apart."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from megatron_rl.agents.chat_messages import arguments_of, whole_characters
from megatron_rl.agents.dialects.asking import (
    MODEL,
    AcceptedParameters,
    Asked,
    Body,
    Dialect,
    Event,
    flag,
    forced,
    limit_of,
    mappings,
    unsupported,
    usage_of,
)
from megatron_rl.agents.session import PolicyTurn, RefusedTurn
from megatron_rl.data.sample import Message
from megatron_rl.rollout.sampling import Sampling

_INVALID = "invalid_messages"
_PARAMETERS = AcceptedParameters(
    read=frozenset(
        {"messages", "system", "tools", "tool_choice", "max_tokens", "temperature", "top_p", "stream", "thinking"}
    ),
    ignored=frozenset({"model", "metadata", "service_tier", "cache_control", "inference_geo"}),
    fixed={"stop_sequences": ([],)},
    remedies={},
)
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


def read(body: Body, sampling: Sampling) -> Asked:
    """Reads a request, see `Dialect.read`."""
    _PARAMETERS.check(body, sampling)
    thinking = body.get("thinking")
    if thinking is not None and not (isinstance(thinking, Mapping) and thinking.get("type") == "adaptive"):
        raise unsupported(
            f"`thinking` = {thinking!r:.80} is not supported: how the model thinks is its chat template's, by the task's "
            "chat_params; leave it out, or set its type to adaptive"
        )
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind not in (None, "auto", "none"):
        raise forced(choice)
    tools = [_tool_of(tool) for tool in mappings(body.get("tools") or [], "tools")] or None
    return Asked(conversation(body), tools, kind != "none", limit_of(body, "max_tokens"), flag(body, "stream"))


def conversation(body: Body) -> list[Message]:
    """A request's messages in the form of chats, the system's before the others."""
    system = _text_of(body.get("system") or "", "system")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    sent = mappings(body.get("messages"), "messages", "messages")
    for i, message in enumerate(sent):
        where = f"messages[{i}]"
        content, role = message.get("content"), message.get("role")
        if role not in ("user", "assistant", "system"):
            raise RefusedTurn(f"{where}.role is {role!r:.80}, must be user, assistant or system", _INVALID)
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        blocks = mappings(content, f"{where}.content", "blocks, or a text")
        if role == "assistant":
            messages.append(_turn_of(blocks, where))
        else:
            messages += _said(cast(str, role), blocks, where)
    return messages


def _said(role: str, blocks: Sequence[Mapping[str, Any]], where: str) -> Iterator[Message]:
    """The user's blocks: each tool's result is a message of its own, and texts that follow one another are one."""
    texts: list[str] = []
    for block in blocks:
        if block.get("type") != "tool_result":
            texts.append(_text_of([block], where))
            continue
        if texts:
            yield {"role": role, "content": "".join(texts)}
            texts = []
        content = _text_of(block.get("content") or "", f"{where}.content")
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
    if texts or not blocks:
        yield {"role": role, "content": "".join(texts)}


def _turn_of(blocks: Sequence[Mapping[str, Any]], where: str) -> Message:
    message: Message = {"role": "assistant", "content": ""}
    calls: list[object] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            message["reasoning_content"] = f"{message.get('reasoning_content', '')}{block.get('thinking', '')}"
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif calls:
            raise RefusedTurn(f"{where} has the model's text behind its calls, which it does not write", _INVALID)
        else:
            message["content"] = f"{message['content']}{_text_of([block], where)}"
    return message | ({"tool_calls": calls} if calls else {})


def _text_of(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for block in mappings(content, where, "blocks, or a text"):
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise RefusedTurn(
                f"{where} has a block of type {block.get('type')!r:.80}, which is not supported", _INVALID
            )
        texts.append(block["text"])
    return "".join(texts)


def _tool_of(tool: Mapping[str, Any]) -> dict[str, object]:
    """A tool in the form of chats."""
    if tool.get("type") not in (None, "custom") or not isinstance(tool.get("input_schema"), Mapping):
        raise unsupported(f"`tools` has one of type {tool.get('type')!r:.80}; tools with an input_schema are supported")
    function = {key: tool[key] for key in ("name", "description", "strict") if key in tool}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def reply(body: Body, turn: PolicyTurn, name: str) -> dict[str, Any]:
    """Writes the answer, see `Dialect.reply`."""
    prompt, drawn = usage_of(turn)
    return {
        "id": f"msg_{name}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": list(_blocks_of(turn.message)),
        "stop_reason": _REASONS[turn.finish_reason],
        "stop_sequence": None,
        "usage": {"input_tokens": prompt, "output_tokens": drawn},
    }


def _blocks_of(message: Message) -> Iterator[dict[str, Any]]:
    calls = cast(list[dict[str, Any]], message.get("tool_calls", []))
    if thought := message.get("reasoning_content"):
        yield {"type": "thinking", "thinking": thought, "signature": ""}
    if message["content"] or not calls:
        yield {"type": "text", "text": message["content"] or ""}
    for call in calls:
        function = call["function"]
        given = whole_characters(arguments_of(function))
        yield {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}


def events(body: Body, response: dict[str, Any]) -> Iterator[Event]:
    """Yields a stream's events, see `Dialect.events`: named; each block started, filled and stopped."""
    usage = response["usage"]
    begun = {**response, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
    yield _named({"type": "message_start", "message": begun})
    for index, block in enumerate(response["content"]):
        empty, deltas = _filled(block)
        yield _named({"type": "content_block_start", "index": index, "content_block": empty})
        for delta in deltas:
            yield _named({"type": "content_block_delta", "index": index, "delta": delta})
        yield _named({"type": "content_block_stop", "index": index})
    ending = {"stop_reason": response["stop_reason"], "stop_sequence": None}
    yield _named({"type": "message_delta", "delta": ending, "usage": {"output_tokens": usage["output_tokens"]}})
    yield _named({"type": "message_stop"})


def _filled(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block before it is filled, and what fills it."""
    if block["type"] == "tool_use":
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
    if block["type"] == "thinking":
        thought = {"type": "thinking_delta", "thinking": block["thinking"]}
        return {**block, "thinking": ""}, [thought, {"type": "signature_delta", "signature": ""}]
    return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]


def _named(event: dict[str, Any]) -> Event:
    return event["type"], event


def refusal(text: str, code: str, status: int) -> dict[str, Any]:
    """Writes a refusal, see `Dialect.refusal`. `code` is ours; Anthropic has kinds of errors only."""
    kind = _KINDS.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": f"{code}: {text}", "code": code}}


DIALECT = Dialect(read, reply, events, refusal)
