"""OpenAI's responses: a conversation as items, of which several are one of the session's messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

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
    openai_refusal,
    unsupported,
    usage_of,
)
from megatron_rl.agents.session import PolicyTurn, RefusedTurn
from megatron_rl.data.sample import Message
from megatron_rl.rollout.sampling import Sampling

_PARAMETERS = AcceptedParameters(
    read=frozenset(
        {"input", "instructions", "tools", "tool_choice", "max_output_tokens", "temperature", "top_p", "stream"}
        | {"previous_response_id"}
    ),
    ignored=frozenset(
        {"model", "user", "metadata", "store", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention"}
        | {"safety_identifier", "client_metadata"}
    ),
    fixed={
        "background": (False,),
        "include": ([], ["reasoning.encrypted_content"]),  # thinking comes in the clear
        "truncation": ("disabled",),
        "text": ({"format": {"type": "text"}}, {}),
        "top_logprobs": (0,),
        "service_tier": ("auto", "default"),
        "reasoning": ({},),
    },
    remedies={
        "conversation": "send the items, or previous_response_id",
        "reasoning": "how the model thinks is its chat template's, by the task's chat_params",
    },
)
_ROLES = ("developer", "system", "user", "assistant")
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def read(body: Body, sampling: Sampling) -> Asked:
    """Reads a request, see `Dialect.read`."""
    _PARAMETERS.check(body, sampling)
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise forced(choice)
    instructions, follows = body.get("instructions"), body.get("previous_response_id")
    for name, value in (("instructions", instructions), ("previous_response_id", follows)):
        if value is not None and not isinstance(value, str):
            raise RefusedTurn(f"`{name}` is {value!r:.80}, must be a text", "invalid_parameter")
    return Asked(
        _messages_of(body.get("input")),
        [_tool_of(tool) for tool in mappings(body.get("tools") or [], "tools")] or None,
        choice != "none",
        limit_of(body, "max_output_tokens"),
        flag(body, "stream"),
        [{"role": "system", "content": instructions}] if instructions else [],
        follows,
    )


def _messages_of(items: object) -> list[Message]:
    """Items as messages. The items of one of the model's turns, which follow one another, are one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    for i, item in enumerate(mappings(items, "input", "items, or a text")):
        message, where = _message_of(item, f"input[{i}]"), f"input[{i}]"
        if message["role"] == "assistant" and messages and messages[-1]["role"] == "assistant":
            messages[-1] = _joined(messages[-1], message, where)
        else:
            messages.append(message)
    return messages


def _message_of(item: Mapping[str, Any], where: str) -> Message:
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise RefusedTurn(f"{where}.role is {role!r:.80}, must be one of {', '.join(_ROLES)}", _INVALID)
        content = _text_of(item.get("content"), f"{where}.content")
        return {"role": "system" if role == "developer" else role, "content": content}
    if kind == "reasoning":
        said = item.get("content") or item.get("summary") or []
        return {"role": "assistant", "content": "", "reasoning_content": _text_of(said, where)}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        output = _text_of(item.get("output"), f"{where}.output")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    raise RefusedTurn(f"{where} is of type {kind!r:.80}, which is not supported", _INVALID)


_INVALID = "invalid_messages"


def _text_of(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in mappings(content, where, "parts, or a text"):
        if part.get("type") not in _TEXTS or not isinstance(part.get("text"), str):
            raise RefusedTurn(
                f"{where} has a part of type {part.get('type')!r:.80}: only texts are supported", _INVALID
            )
        texts.append(part["text"])
    return "".join(texts)


def _joined(turn: Message, more: Message, where: str) -> Message:
    """Two messages of one turn as one."""
    if turn.get("tool_calls") and more["content"]:
        raise RefusedTurn(f"{where} is the model's text behind its calls, which it does not write", _INVALID)
    joined: Message = {"role": "assistant", "content": f"{turn['content']}{more['content']}"}
    if "reasoning_content" in turn or "reasoning_content" in more:
        joined["reasoning_content"] = f"{turn.get('reasoning_content', '')}{more.get('reasoning_content', '')}"
    calls = [*cast(list[object], turn.get("tool_calls", [])), *cast(list[object], more.get("tool_calls", []))]
    return joined | ({"tool_calls": calls} if calls else {})


def _tool_of(tool: Mapping[str, Any]) -> dict[str, object]:
    """A function in the form of chats."""
    if tool.get("type") != "function":
        raise unsupported(f"`tools` has one of type {tool.get('type')!r:.80}; functions are supported")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def reply(body: Body, turn: PolicyTurn, name: str) -> dict[str, Any]:
    """Writes the answer, see `Dialect.reply`."""
    prompt, drawn = usage_of(turn)
    cut = turn.finish_reason == "length"
    status = "incomplete" if cut else "completed"
    echoed = {key: body.get(key) for key in ("instructions", "previous_response_id", "max_output_tokens")}
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": 0,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": MODEL,
        "output": list(_items_of(turn.message, name, status)),
        **echoed,
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": True,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": drawn,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + drawn,
        },
    }


def _items_of(message: Message, name: str, status: str) -> Iterator[dict[str, Any]]:
    """The output items of a turn."""
    calls = cast(list[dict[str, Any]], message.get("tool_calls", []))
    if thought := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thought}]
        yield {"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": content, "status": status}
    if message["content"] or not calls:
        text = {"type": "output_text", "text": message["content"] or "", "annotations": [], "logprobs": []}
        yield {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": status, "content": [text]}
    for call in calls:
        function = {key: call["function"][key] for key in ("name", "arguments")}
        named = {"id": f"fc_{name}_{call['id']}", "type": "function_call", "call_id": call["id"]}
        yield {**named, **function, "status": status}


def events(body: Body, response: dict[str, Any]) -> Iterator[Event]:
    """Yields a stream's events, see `Dialect.events`: named, numbered, each item added, filled and done."""
    for number, event in enumerate(_unnumbered(response)):
        yield event["type"], {**event, "sequence_number": number}


def _unnumbered(response: dict[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for position, item in enumerate(response["output"]):
        at = {"output_index": position}
        empty = "arguments" if item["type"] == "function_call" else "content"
        added = {**item, "status": "in_progress", empty: "" if empty == "arguments" else []}
        yield {"type": "response.output_item.added", **at, "item": added}
        at["item_id"] = item["id"]
        if item["type"] == "function_call":
            arguments = item["arguments"]
            yield {"type": "response.function_call_arguments.delta", **at, "delta": arguments}
            yield {"type": "response.function_call_arguments.done", **at, "name": item["name"], "arguments": arguments}
        else:
            [part] = item["content"]
            kind = part["type"]  # output_text | reasoning_text
            at["content_index"] = 0
            logprobs: dict[str, object] = {"logprobs": []} if kind == "output_text" else {}
            yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
            yield {"type": f"response.{kind}.delta", **at, "delta": part["text"], **logprobs}
            yield {"type": f"response.{kind}.done", **at, "text": part["text"], **logprobs}
            yield {"type": "response.content_part.done", **at, "part": part}
        yield {"type": "response.output_item.done", "output_index": position, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}


DIALECT = Dialect(read, reply, events, openai_refusal, remembers=True)
