"""Demonstrated conversations as tokens, the same that a rollout of them has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np

from megatron_rl.agents.ledger import Ledger
from megatron_rl.agents.rendering import Renderer
from megatron_rl.agents.replies import read_reply
from megatron_rl.data.sample import Message, Sample
from megatron_rl.rewards.tool_parsers import ParserName
from megatron_rl.tasks.tokenizing import Tools, as_chat, encode


def conversation_ids(
    renderer: Renderer, sample: Sample, turns: Sequence[Message], parser: ParserName | Literal["none"]
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens after a sample's prompt where the conversation goes on like this: int64 [tokens], and which of them the policy
    writes, bool [tokens]. Each of its turns ends with the end-of-sequence token.

    Args:
        turns: the assistant's messages, whose content is the whole text of the turn, and others' between them.
        parser: of tool calls, that of the task's agent.

    Raises:
        ValueError: the first or the last message is not the assistant's, or two of its messages follow one another.
    """
    roles = [message["role"] for message in turns]
    if not roles or roles[0] != "assistant" or roles[-1] != "assistant":
        raise ValueError("a demonstrated conversation begins and ends with a message of the assistant")
    ledger, messages = Ledger(renderer, sample), [*as_chat(sample.prompt)]
    tools = cast(Tools, sample.metadata.get("tools"))
    end, waiting = renderer.tokenizer.eos_token_id, list[str]()
    for message in turns:
        if message["role"] == "assistant":
            text = str(message["content"])
            ledger.request(messages, tools)
            reply = read_reply(text, "stop", None if parser == "none" else parser, ledger.turns, tools=tools)
            drawn = encode([text], renderer.tokenizer)[0] if text else []
            ledger.record([*drawn, end], None, 0, "stop", reply.message)
            messages = [*messages, reply.message]
            waiting = [call["id"] for call in cast(list[Any], reply.message.get("tool_calls", []))]
        elif message["role"] == "tool" and "tool_call_id" not in message and waiting:
            messages = [*messages, {**message, "tool_call_id": waiting.pop(0)}]
        else:
            messages = [*messages, message]
    segments = ledger.segments[1:]
    drawn_by_policy = [segment.logprobs is not None for segment in segments]
    lengths = [len(segment.ids) for segment in segments]
    return np.concatenate([segment.ids for segment in segments]), np.repeat(drawn_by_policy, lengths)
