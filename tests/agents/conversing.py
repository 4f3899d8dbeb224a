"""Random conversations: a model that draws any tokens, and a client that writes its messages in its own way."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerFast

from megatron_rl.agents.ledger import Ledger
from megatron_rl.agents.rendering import Renderer
from megatron_rl.agents.replies import read_reply, turn_text
from megatron_rl.data.rollout import Rollout
from megatron_rl.data.sample import Message, Sample
from tests.agents.families import Family, tokenizer_of

PROPERTIES = {"what": {"type": "string"}, "n": {"type": "integer"}}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks.",
            "parameters": {"type": "object", "properties": PROPERTIES},
        },
    }
]
PIECES = (
    "lamp",
    "\n",
    "\n\n",
    " ",
    "  the",
    "é",
    "日本",
    "🙂",
    "{",
    "}",
    '"',
    "\\",
    "<",
    "|>",
    "</",
    "user",
    "assistant\n",
    "0",
)
ASCII = tuple(piece for piece in PIECES if piece.isascii())
# What a template writes before a turn's text where the turn is the last, and not where others follow.
THINK = ("<think>", "</think>")


def text_of(rng: random.Random, family: Family, special: bool) -> str:
    """A few pieces; `special`: texts of the family's tokens among them."""
    pieces = ASCII if family.metaspace else PIECES
    tokens = (*family.special, *family.added) if special else ()
    return "".join(rng.choice([*pieces, *tokens]) for _ in range(rng.randint(1, 8)))


@dataclass
class Turn:
    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    faithful: bool  # it is what the template writes, if in other tokens
    message: Message  # what a client is answered


@dataclass
class Conversation:
    """One that was had, with all that was sent and drawn."""

    family: Family
    tokenizer: PreTrainedTokenizerFast
    renderer: Renderer
    sample: Sample
    ledger: Ledger
    messages: list[Message]  # as they are meant; the last are behind the last turn
    turns: list[Turn] = field(default_factory=list)
    requests: list[list[int]] = field(default_factory=list)

    @property
    def rollout(self) -> Rollout:
        return Rollout(self.sample.id, 0, self.ledger.segments, self.turns[-1].finish_reason)


@cache
def renderer_of(name: str, **params: object) -> Renderer:
    return Renderer(tokenizer_of(name), {"date_string": "1 Jan"} | params)


def begin(
    family: Family, messages: list[Message], tools: list[dict[str, Any]] | None = None, **params: object
) -> Conversation:
    tokenizer, renderer = tokenizer_of(family.name), renderer_of(family.name, **params)
    metadata = {"tools": tools} if tools else {}
    sample = Sample("task/0", "task", messages, renderer.first(messages, tools), metadata=metadata)
    return Conversation(family, tokenizer, renderer, sample, Ledger(renderer, sample), list(messages))


def had(family: Family, rng: random.Random) -> Conversation:
    """A conversation of one to four turns, with a request behind the last."""
    first: list[Message] = [{"role": "user", "content": text_of(rng, family, False)}]
    if rng.random() < 0.5:
        first.insert(0, {"role": "system", "content": text_of(rng, family, False)})
    tools = rng.choice([None, TOOLS]) if family.lists_tools_once else None
    conversation = begin(family, first, tools)
    for _ in range(rng.randint(1, 4)):
        ask(conversation, rng)
        answer(conversation, draw(conversation, rng))
        go_on(conversation, rng)
    ask(conversation, rng)
    return conversation


def ask(conversation: Conversation, rng: random.Random) -> None:
    sent = [replayed(message, rng) for message in conversation.messages]
    tools = json.loads(json.dumps(conversation.sample.metadata.get("tools"), sort_keys=rng.random() < 0.5))
    conversation.requests.append(conversation.ledger.request(sent, tools))


def answer(conversation: Conversation, turn: Turn) -> None:
    conversation.ledger.record(turn.ids, turn.logprobs, len(conversation.turns), turn.finish_reason, turn.message)
    conversation.turns.append(turn)
    conversation.messages.append(turn.message)


def go_on(conversation: Conversation, rng: random.Random) -> None:
    """Results of a turn's calls, or what the user says next."""
    family, messages = conversation.family, conversation.messages
    calls: Any = messages[-1].get("tool_calls", [])
    for call in calls:
        messages.append({"role": "tool", "content": text_of(rng, family, True), "tool_call_id": call["id"]})
    if not calls or rng.random() < 0.2:
        messages.append({"role": "user", "content": text_of(rng, family, True)})


def draw(conversation: Conversation, rng: random.Random) -> Turn:
    """A turn: as the template writes one, in any tokens; or tokens at random. Ended by one of the stop tokens, or cut."""
    family, tokenizer = conversation.family, conversation.tokenizer
    faithful, cut = rng.random() < 0.7, rng.random() < 0.2
    calls = faithful and not cut and rng.random() < 0.5 and conversation.renderer._ends.call != ""
    stop = rng.choice(family.stops)
    if faithful:
        message: Message = {"role": "assistant", "content": text_of(rng, family, False).strip() or "lamp"}
        if calls:
            function = {"name": "look", "arguments": json.dumps({"what": text_of(rng, family, False), "n": 1})}
            call = {"id": f"call{len(conversation.turns):05d}", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        written, ending = written_by_template(conversation, message)
        stop = ending if calls and ending else stop
        ids = segmented(written, tokenizer, rng)
    else:
        stops = {tokenizer.convert_tokens_to_ids(token) for token in family.stops}
        ids = [i for i in rng.choices(range(len(tokenizer)), k=rng.randint(1, 12)) if i not in stops]
    if not cut:
        ids.append(tokenizer.convert_tokens_to_ids(stop))
    if cut and not ids:
        ids = [5]
    finish_reason = "length" if cut else "stop"
    text = turn_text(tokenizer, ids, finish_reason)
    written_calls = [*map(meant, message.get("tool_calls", []))] if faithful else None
    message = read_reply(text, finish_reason, family.parser, len(conversation.turns), tools=TOOLS).message
    if calls:
        assert [*map(meant, message["tool_calls"])] == written_calls, text
    return Turn(ids, [-rng.random() for _ in ids], finish_reason, faithful, message)


def meant(call: Any) -> tuple[str, Any]:
    return call["function"]["name"], json.loads(call["function"]["arguments"])


def written_by_template(conversation: Conversation, turn: Message) -> tuple[str, str]:
    """What the template writes as a last turn behind a question, and the token by which it ends it."""
    renderer, family = conversation.renderer, conversation.family
    question: list[Message] = [{"role": "user", "content": "?"}]
    whole = renderer.text([*question, turn], None, False)
    asked = renderer.text(question, None, True)
    for tag in ("<think>\n",):
        if not whole.startswith(asked):
            asked = asked.removesuffix(tag)
    assert whole.startswith(asked)
    written = whole[len(asked) :].rstrip("\n") if family.name != "plain" else whole[len(asked) :].removesuffix("\n")
    for token in (*family.special, "<|observation|>"):
        if written.endswith(token):
            return written.removesuffix(token), token
    return written, "<|observation|>" if family.name == "glm4" else ""


def segmented(text: str, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> list[int]:
    """Tokens of a text, but seldom those that the tokenizer would make of it: it is cut at random."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    added = tokenizer.added_tokens_decoder
    out: list[int] = []
    for i in ids:
        piece = tokenizer.convert_ids_to_tokens(i)
        split = i not in added and rng.random() < 0.5
        out += [tokenizer.convert_tokens_to_ids(character) for character in piece] if split else [i]
    return out


def replayed(message: Message, rng: random.Random) -> Message:
    """A message as a client may send it back: keys and arguments in another order, with keys that say nothing."""
    sent: dict[str, Any] = json.loads(json.dumps(message))
    if sent["role"] == "assistant":
        if rng.random() < 0.5:
            sent.pop("reasoning_content", None)
        if rng.random() < 0.5:
            sent |= {"refusal": None, "audio": None, "function_call": None}
        if not sent.get("content"):
            sent["content"] = rng.choice([None, ""])
        for call in sent.get("tool_calls") or []:
            arguments = json.loads(call["function"]["arguments"])
            items = list(arguments.items())
            rng.shuffle(items)
            call["function"]["arguments"] = json.dumps(dict(items), indent=rng.choice([None, 1]))
        if "tool_calls" not in sent and rng.random() < 0.5:
            sent["tool_calls"] = rng.choice([None, []])
    elif rng.random() < 0.3:
        sent["content"] = [{"type": "text", "text": sent["content"]}]
    items = list(sent.items())
    rng.shuffle(items)
    return dict(items)
