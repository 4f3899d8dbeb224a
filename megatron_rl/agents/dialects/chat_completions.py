"""OpenAI's chat completions, and what vLLM and NeMo-Gym add to them: the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
    mapping,
    mappings,
    openai_refusal,
    unsupported,
    usage_of,
)
from megatron_rl.agents.session import PolicyTurn, RefusedTurn
from megatron_rl.rollout.sampling import Sampling

_PARAMETERS = AcceptedParameters(
    read=frozenset(
        {"messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "temperature", "top_p", "stream"}
        | {"stream_options", "logprobs", "return_token_ids", "return_tokens_as_token_ids"}
    ),
    ignored=frozenset(
        {"model", "user", "metadata", "store", "parallel_tool_calls", "prompt_cache_key", "safety_identifier"}
    ),
    fixed={
        "n": (1,),
        "top_logprobs": (0,),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "response_format": ({"type": "text"},),
    },
    remedies={"n": "ask once per rollout; rollout.group_size says how many there are"},
)


def read(body: Body, sampling: Sampling) -> Asked:
    """Reads a request, see `Dialect.read`."""
    messages = body.get("messages")
    if not (isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)):
        raise RefusedTurn("`messages` must be a list of messages", "invalid_messages")
    _PARAMETERS.check(body, sampling)
    mapping(body, "stream_options")
    if flag(body, "logprobs") and not flag(body, "return_tokens_as_token_ids"):
        raise unsupported(
            "`logprobs` is true, and log-probs are given by token ids only: set return_tokens_as_token_ids, too, or leave "
            "it out"
        )
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise forced(choice)
    limit = limit_of(body, "max_completion_tokens", "max_tokens")
    tools = [*mappings(body.get("tools") or [], "tools", "JSON schemas")] or None
    return Asked(messages, tools, choice != "none", limit, flag(body, "stream"))


def reply(body: Body, turn: PolicyTurn, name: str) -> dict[str, Any]:
    """Writes the answer, see `Dialect.reply`. It says nothing of the time: an agent is a function of what was drawn."""
    message, choice = dict(turn.message), dict[str, object]()
    completion: dict[str, Any] = {
        "id": f"chatcmpl-{name}",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [choice],
    }
    choice |= {"index": 0, "message": message, "finish_reason": turn.finish_reason, "logprobs": None}
    if body.get("logprobs") and turn.logprobs is not None:
        pairs = list(zip(turn.ids, turn.logprobs, strict=True))
        content: list[dict[str, object]] = [
            {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
            for token, value in pairs
        ]
        choice["logprobs"] = {"content": content, "refusal": None}
        # NeMo-Gym's model server looks for them here before it asks for the prompt's tokens in another request.
        message["prompt_token_ids"] = turn.prompt_ids
        message["generation_token_ids"], message["generation_log_probs"] = turn.ids, turn.logprobs
    if flag(body, "return_token_ids"):
        completion["prompt_token_ids"], choice["token_ids"] = turn.prompt_ids, turn.ids
    prompt, drawn = usage_of(turn)
    return completion | {"usage": {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}}


def events(body: Body, completion: dict[str, Any]) -> Iterator[Event]:
    """Yields a stream's events, see `Dialect.events`: chunks without names, the last of which is `[DONE]`."""
    with_usage = mapping(body, "stream_options").get("include_usage")
    [choice] = completion["choices"]
    message, role = choice["message"], choice["message"]["role"]
    usage = {"usage": None} if with_usage else {}
    prompt_ids = {key: completion[key] for key in ("prompt_token_ids",) if key in completion}

    def chunk(delta: dict[str, Any], **more: object) -> Event:
        piece = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        shared = {key: completion[key] for key in ("id", "created", "model")}
        return None, {**shared, "object": "chat.completion.chunk", "choices": [piece], **usage}

    name, first = chunk({"role": role, "content": ""})
    yield name, {**first, **prompt_ids} if isinstance(first, dict) else first
    for key, value in message.items():
        if key == "tool_calls":
            for position, call in enumerate(value):
                yield chunk({"tool_calls": [{"index": position, **call}]})
        elif key != "role" and value:
            yield chunk({key: value})
    more = {key: choice[key] for key in ("token_ids", "logprobs") if key in choice}
    yield chunk({}, finish_reason=choice["finish_reason"], **more)
    if with_usage:
        shared = {key: completion[key] for key in ("id", "created", "model", "usage")}
        yield None, {**shared, "object": "chat.completion.chunk", "choices": []}
    yield None, "[DONE]"


DIALECT = Dialect(read, reply, events, openai_refusal)
