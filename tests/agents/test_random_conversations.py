"""Random conversations over all templates: what is trained on is what was drawn, and what stands between the turns is what
the template writes there."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import numpy as np
import pytest

from tests.agents.conversing import THINK, Conversation, Turn, had
from tests.agents.families import FAMILIES, Family

COUNT = int(os.environ.get("CONVERSATIONS", "125"))
# The token by which the template ends a turn that others follow.
ENDS = {
    "qwen2.5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3.5": "<|im_end|>",
    "llama3.1": "<|eot_id|>",
    "mistral": "</s>",
    "gpt-oss": "<|end|>",
    "deepseek": "<｜end▁of▁sentence｜>",
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def test_what_is_trained_is_what_was_drawn_and_the_rest_is_the_templates(family: Family) -> None:
    for number in range(COUNT):
        conversation = had(family, random.Random(f"{family.name} {number}"))
        try:
            check_tokens(conversation)
            check_structure(conversation)
        except AssertionError as error:
            raise AssertionError(f"conversation {number} of {family.name}: {error}") from error


def check_tokens(conversation: Conversation) -> None:
    rollout, turns, requests = conversation.rollout, conversation.turns, conversation.requests
    assert rollout.response_ids.tolist() == [i for turn in turns for i in turn.ids]
    assert rollout.logprobs.tolist() == np.float32([value for turn in turns for value in turn.logprobs]).tolist()
    assert rollout.prompt_ids.tolist() == conversation.sample.prompt_ids == requests[0]
    drawn = [segment for segment in rollout.segments if segment.logprobs is not None]
    assert [segment.version for segment in drawn] == list(range(len(turns)))
    for before, turn, after in zip(requests, turns, requests[1:], strict=False):
        assert after[: len(before) + len(turn.ids)] == before + turn.ids
    last = requests[-2] + turns[-1].ids
    assert rollout.tokens.tolist() == last
    assert conversation.ledger.room(10**6) == 10**6 - len(requests[-1]) + len(requests[0])


def check_structure(conversation: Conversation) -> None:
    """The special tokens that a request has before its first turn and behind each are those that the template writes there,
    given the conversation up to the request: some templates write a turn otherwise once others follow."""
    messages, requests = conversation.messages, conversation.requests
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    assert special(conversation, requests[0]) == by_template(conversation, places[0], True)
    for number, turn in enumerate(conversation.turns):
        given = requests[number + 1][len(requests[number]) + len(turn.ids) :]
        following = [*places, len(messages)][number + 1]
        expected = behind(conversation, turn, places[number], following)
        assert special(conversation, given) == expected, f"behind turn {number}"


def behind(conversation: Conversation, turn: Turn, place: int, following: int) -> list[str]:
    """What the template writes behind the turn that is message `place`, up to the turn that is message `following`."""
    family = conversation.family.name
    last = conversation.tokenizer.convert_ids_to_tokens(turn.ids[-1]) if turn.finish_reason == "stop" else None
    through = by_template(conversation, place + 1, False)
    written = by_template(conversation, following, True)
    size = len(through) - (family in ENDS)  # GPT-OSS ends the last turn by another token than earlier ones
    assert written[:size] == through[:size]
    text = written[size:]
    if family in ENDS:
        assert text[0] == ENDS[family] or last == text[0] == "<|call|>"
    ended = last is not None and (
        family in ENDS or text[:1] == [last]
    )  # GLM's turns end with what the next message begins
    return text[ended:]


def special(conversation: Conversation, ids: list[int]) -> list[str]:
    added = conversation.tokenizer.added_tokens_decoder
    return [added[i].content for i in ids if i in added and added[i].content not in THINK]


def by_template(conversation: Conversation, count: int, add_generation_prompt: bool) -> list[str]:
    """Of the first messages, in harmless words."""
    messages = [harmless(message) for message in conversation.messages[:count]]
    tools: Any = conversation.sample.metadata.get("tools")
    text = conversation.renderer.text(messages, tools, add_generation_prompt)
    return special(conversation, conversation.tokenizer(text, add_special_tokens=False)["input_ids"])


def harmless(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return {**message, "content": "word"}
    call = message["tool_calls"][-1]
    arguments = {f"a{i}": "b" for i in range(len(json.loads(call["function"]["arguments"])))}
    return {
        **message,
        "content": "",
        "tool_calls": [{**call, "function": {**call["function"], "arguments": json.dumps(arguments)}}],
    }
