"""OpenAI's client as agents in this process have it.

For each request openai 3.52 compares every message with the type of every kind of message, though none of them is written
in another form in the end: more time than all else in a turn, and in a long conversation several times as much.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from openai import AsyncOpenAI
from openai.resources.chat import AsyncChat, AsyncCompletions
from openai.types.chat import ChatCompletionMessageParam


class PolicyClient(AsyncOpenAI):
    """A client whose chat completions send messages that are plain JSON as they are."""

    @cached_property
    def chat(self) -> AsyncChat:
        return _Chat(self)


class _Chat(AsyncChat):
    @cached_property
    def completions(self) -> AsyncCompletions:
        return _Completions(self._client)


class _Completions(AsyncCompletions):
    async def create(  # type: ignore[override]
        self,
        *,
        messages: Iterable[ChatCompletionMessageParam],
        extra_body: Mapping[str, object] | None = None,
        **more: Any,
    ) -> Any:
        messages = list(messages)
        if _is_json(messages):
            messages, extra_body = [], {"messages": messages, **(extra_body or {})}
        return await super().create(messages=messages, extra_body=extra_body, **more)


def _is_json(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_json, value.values()))
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int | float)
