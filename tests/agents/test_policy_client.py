"""The client that agents are given sends what OpenAI's sends."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI, omit
from openai.types.chat import ChatCompletion, ParsedChatCompletionMessage

from megatron_rl.agents.policy_client import PolicyClient
from tests.agents.conversing import TOOLS, replayed

CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": '{"what": "lamp"}'}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}}
SPOKEN: list[dict[str, Any]] = [
    {"role": "system", "content": "be"},
    {"role": "user", "content": [{"type": "text", "text": "so"}, PICTURE], "name": "ann"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
    {"role": "tool", "content": "a lamp", "tool_call_id": "call00000"},
    {"role": "assistant", "content": "yes", "refusal": None},
]
PARSED: Any = ParsedChatCompletionMessage(role="assistant", content="1", parsed=1)
REPLY = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 0,
    "model": "policy",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "so"}, "finish_reason": "stop"}],
}


def sent(kind: type[AsyncOpenAI], messages: Any, **more: Any) -> tuple[dict[str, Any], ChatCompletion]:
    """The request's body, and the answer."""
    bodies = []

    def served(request: httpx2.Request) -> httpx2.Response:
        bodies.append(json.loads(request.content))
        return httpx2.Response(200, json=REPLY)

    async def ask() -> Any:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(served)) as http_client:
            model = kind(base_url="http://engine/v1", api_key="k", http_client=http_client)
            return await model.chat.completions.create(model="policy", messages=messages, **more)

    answer = asyncio.run(ask())
    return bodies[0], answer


@pytest.mark.parametrize(
    ("messages", "more"),
    [
        *[([replayed(message, random.Random(seed)) for message in SPOKEN], {"tools": TOOLS}) for seed in range(5)],
        ([*SPOKEN, PARSED], {}),
        ([{**SPOKEN[2], "tool_calls": omit, "content": PARSED}, SPOKEN[3]], {}),
        ((*SPOKEN,), {"extra_body": {"return_token_ids": True}, "max_tokens": 4}),
        (SPOKEN, {"extra_body": {"messages": SPOKEN[:1]}}),
    ],
)
def test_it_sends_what_openai_s_sends(messages: Any, more: dict[str, Any]) -> None:
    assert sent(PolicyClient, messages, **more) == sent(AsyncOpenAI, messages, **more)


def test_messages_may_come_one_by_one() -> None:
    assert sent(PolicyClient, iter(SPOKEN))[0]["messages"] == sent(AsyncOpenAI, SPOKEN)[0]["messages"]


def test_plain_messages_are_not_compared_with_their_types(monkeypatch: pytest.MonkeyPatch) -> None:
    from openai.resources.chat.completions import completions

    transform, seen = completions.async_maybe_transform, []

    async def watched(data: Any, kind: object) -> Any:
        seen.append(data["messages"])
        return await transform(data, kind)

    monkeypatch.setattr(completions, "async_maybe_transform", watched)
    sent(PolicyClient, SPOKEN)
    sent(PolicyClient, [*SPOKEN, PARSED])
    assert seen == [[], [*SPOKEN, PARSED]]
