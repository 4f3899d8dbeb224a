"""The parts that every dialect is made of: a request's parameters are each read, ignored because it says nothing of the
answer, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from megatron_rl.agents.session import PolicyTurn, RefusedTurn, Tools
from megatron_rl.data.sample import Message
from megatron_rl.rollout.sampling import Sampling

MODEL = "policy"
Body: TypeAlias = Mapping[str, Any]
Event: TypeAlias = tuple[str | None, Mapping[str, object] | str]
"""A server-sent event: its name, where the dialect names events, and its data (a text stands as it is)."""


@dataclass(frozen=True)
class Asked:
    """A request for a turn, as the session takes it.

    Attributes:
        messages: what was said, in OpenAI's form of chats; behind those of `follows`, where that is set.
        instructions: messages before all others that hold for this request only.
        follows: the reply whose conversation this goes on with.
        tokens: the whole sequence; there are no messages then.
    """

    messages: list[Message] = field(default_factory=list)
    tools: Tools | None = None
    reads_calls: bool = True
    max_tokens: int | None = None
    stream: bool = False
    instructions: list[Message] = field(default_factory=list)
    follows: str | None = None
    tokens: list[int] | None = None


@dataclass(frozen=True)
class Dialect:
    """A form of requests, answers and refusals.

    Attributes:
        read: raises RefusedTurn where a request asks for what the recipe does not say, or for what there is not.
        reply: of a request, a turn and the turn's id, which is the same whoever asked when.
        events: of a request and its reply; the whole reply as the events of the dialect's stream, in their order. None: there
            are no streams, and `read` refuses one.
        refusal: of a text, a code and an HTTP status.
        remembers: a later request may name a reply's `id` in the place of what was said up to it.
    """

    read: Callable[[Body, Sampling], Asked]
    reply: Callable[[Body, PolicyTurn, str], dict[str, Any]]
    events: Callable[[Body, dict[str, Any]], Iterable[Event]] | None
    refusal: Callable[[str, str, int], dict[str, Any]]
    remembers: bool = False


@dataclass(frozen=True)
class AcceptedParameters:
    """A dialect's parameters.

    Attributes:
        ignored: they say nothing of the answer.
        fixed: parameter -> its only values besides null.
        remedies: parameter -> what to do instead.
    """

    read: frozenset[str]
    ignored: frozenset[str]
    fixed: Mapping[str, tuple[object, ...]]
    remedies: Mapping[str, str]

    def check(self, body: Body, sampling: Sampling, within: str = "") -> None:
        """Raises RefusedTurn where a parameter is not known, or has another value than it may have.

        Args:
            within: what the names are given under, such as `sampling_params.`.
        """
        for name, value in body.items():
            if value is None or name in self.ignored or name in self.read:
                continue
            remedy = f": {self.remedies[name]}" if name in self.remedies else ""
            if name not in self.fixed:
                raise unsupported(f"`{within}{name}` is not supported{remedy}; leave it out")
            if not any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
                       for allowed in self.fixed[name]):  # fmt: skip
                raise unsupported(f"`{within}{name}` = {value!r:.80} is not supported{remedy}; leave it out")
        for name, drawn in (("temperature", sampling.temperature), ("top_p", sampling.top_p)):
            if body.get(name) not in (None, drawn):
                raise unsupported(
                    f"`{within}{name}` is {body[name]!r:.80}, and the recipe draws with {drawn:g}: what is trained on is "
                    "drawn as the recipe says; leave it out"
                )


def unsupported(text: str) -> RefusedTurn:
    return RefusedTurn(text, "unsupported_parameter")


def limit_of(body: Body, *names: str) -> int | None:
    """The first limit on a turn's tokens that is given; all that are must be positive."""
    limits = []
    for name in names:
        limit = body.get(name)
        if limit is None:
            continue
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise RefusedTurn(f"`{name}` is {limit!r:.80}, must be a positive integer", "invalid_parameter")
        limits.append(limit)
    return limits[0] if limits else None


def flag(body: Body, name: str) -> bool:
    """A boolean parameter; null and nothing are false."""
    value = body.get(name)
    if value not in (None, True, False) or isinstance(value, int) is not isinstance(value, bool):
        raise RefusedTurn(f"`{name}` is {value!r:.80}, must be true or false", "invalid_parameter")
    return bool(value)


def mapping(body: Body, name: str) -> Mapping[str, Any]:
    """An object; null and nothing are an empty one. RefusedTurn where it is none."""
    value = body.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise RefusedTurn(f"`{name}` is {value!r:.80}, must be an object", "invalid_parameter")
    return value or {}


def mappings(value: object, name: str, of: str = "objects") -> Sequence[Mapping[str, Any]]:
    """A list of objects, RefusedTurn where it is none."""
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise RefusedTurn(f"`{name}` must be a list of {of}", "invalid_parameter")
    return value


def forced(choice: object) -> RefusedTurn:
    """The refusal of a tool choice that would have the engine draw from another distribution than the one that is trained."""
    return unsupported(
        f"`tool_choice` is {choice!r:.80}; `auto` and `none` are supported: a call that is forced is not drawn from the "
        "policy that is trained"
    )


def openai_refusal(text: str, code: str, status: int) -> dict[str, Any]:
    return {"error": {"message": text, "type": "invalid_request_error", "param": None, "code": code}}


def usage_of(turn: PolicyTurn) -> tuple[int, int]:
    """Tokens of the prompt, and drawn."""
    return len(turn.prompt_ids), len(turn.ids)
