"""Random conversations over all templates: what is trained on is what was drawn, and what stands between the turns is what
the template writes there."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import numpy as np
import pytest

from tests.agents.conversing import THINK, Conversation, had
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
}
ENDS["deepseek"] = "<｜end▁of▁sentence｜>"
GLM_ROLES = {"user": "<|user|>", "tool": "<|observation|>"}


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
    """The special tokens, but those within turns that the template would not have written, are those of its own rendering."""
    assert names(conversation, structure(conversation)) == names(conversation, by_template(conversation))


def names(conversation: Conversation, ids: list[int]) -> list[str]:
    return [conversation.tokenizer.convert_ids_to_tokens(i) for i in ids]


def special(conversation: Conversation, ids: list[int]) -> list[int]:
    added = conversation.tokenizer.added_tokens_decoder
    return [i for i in ids if i in added and added[i].content not in THINK]


def structure(conversation: Conversation) -> list[int]:
    tokenizer, family = conversation.tokenizer, conversation.family
    ids, at = special(conversation, conversation.requests[0]), len(conversation.requests[0])
    end = ENDS.get(family.name)
    places = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    for turn, request, place in zip(conversation.turns, conversation.requests[1:], places, strict=True):
        at += len(turn.ids)
        ended = turn.finish_reason == "stop"
        within = turn.ids[:-1] if ended else turn.ids
        if not turn.faithful:
            within = tokenizer(family.begins, add_special_tokens=False)["input_ids"] if family.begins else []
        ids += special(conversation, within)
        last, appended = turn.ids[-1], request[at:]
        if ended and end is not None:
            called = tokenizer.convert_ids_to_tokens(last) == "<|call|>"
            ids.append(last if called else tokenizer.convert_tokens_to_ids(end))
        next_role = str(conversation.messages[place + 1]["role"])
        if ended and family.name == "glm4" and tokenizer.convert_ids_to_tokens(last) == GLM_ROLES[next_role]:
            ids.append(last)  # it is the next message's first token too
        ids += special(conversation, appended)
        at = len(request)
    return ids


def by_template(conversation: Conversation) -> list[int]:
    """Of the whole conversation at once, in harmless words."""
    messages = [harmless(message) for message in conversation.messages]
    tools: Any = conversation.sample.metadata.get("tools")
    text = conversation.renderer.text(messages, tools, True)
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
