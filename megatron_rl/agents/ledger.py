"""One conversation's tokens: what the model was given and what it drew, in one sequence that is only appended to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from megatron_rl.agents.chat_messages import difference, read_messages, same_tools
from megatron_rl.agents.rendering import Renderer
from megatron_rl.base.messages import errors_named
from megatron_rl.data.rollout import Segment
from megatron_rl.data.sample import Message, Sample
from megatron_rl.tasks.tokenizing import Tools, as_chat

_REMEDY = (
    "a rollout is one sequence, so send what was sent before with the model's answers, and new messages behind; other "
    "conversations, shortened histories and second answers to the same messages have no sequence of their own yet"
)


class LedgerError(ValueError):
    """A request that this conversation cannot go on with. The message is for the agent's author."""


class OtherPrompt(LedgerError):
    """The first request is not the sample's prompt."""


class Forked(LedgerError):
    """A request that does not continue the conversation: it needs a sequence of its own."""


class Ledger:
    """The tokens and messages of a rollout's conversation.

    Args:
        sample: of a chat; its prompt is the first request, and its `prompt_ids` are that request's tokens.
    """

    def __init__(self, renderer: Renderer, sample: Sample) -> None:
        self._renderer = renderer
        self._tools = cast(Tools, sample.metadata.get("tools"))
        self._messages = read_messages(as_chat(sample.prompt))  # the prompt, or all up to the last recorded turn
        self._segments = [Segment(np.asarray(sample.prompt_ids, dtype=np.int64))]
        self._pending: tuple[list[Message], list[int]] | None = None  # a request's messages, and what it appends
        self._ended: int | None = None  # the drawn token that ended the last turn; None: it was cut
        self.turns = 0

    def request(self, messages: Sequence[Mapping[str, object]], tools: Tools) -> list[int]:
        """Tokens to continue: all that are recorded, and those of the messages that are new.

        The same messages again, before they have an answer, are the same request.

        Raises:
            OtherPrompt: the first request is not the sample's prompt with its tools.
            Forked: a later one does not begin with what is recorded, or adds nothing that the model may answer.
            LedgerError: the chat template or the tokenizer refuses what is new, or it is more than text.
        """
        with errors_named("", as_error=LedgerError):
            sent = read_messages(messages)
        if self._pending is not None:
            self._check_retry(sent, self._pending[0])
        elif self.turns == 0:
            self._check_prompt(sent, tools)
            self._pending = self._messages, []
        else:
            new = self._added(sent, tools)
            whole = [*self._messages, *new]
            with errors_named("", as_error=LedgerError):
                appended = self._renderer.following(whole, len(self._messages), self._tools, self._ended)
            self._pending = whole, appended
        return self._recorded + self._pending[1]

    def request_tokens(self, tokens: Sequence[int]) -> list[int]:
        """These tokens, which are all that are recorded, and new ones behind. The new ones' text is a message of the user's.

        Raises:
            OtherPrompt: the first request is not the sample's prompt.
            Forked: a later one does not begin with what is recorded, or adds nothing.
        """
        recorded = self._recorded
        known = recorded + (self._pending[1] if self._pending else [])
        if [*tokens[: len(known)]] != known:
            pairs = enumerate(zip(tokens, known, strict=False))
            places = (f"token_ids[{i}] is {theirs}, and was {ours}" for i, (theirs, ours) in pairs if theirs != ours)
            where = next(places, f"it has {len(tokens)} tokens, and there are {len(known)}")
            raise (Forked if self.turns else OtherPrompt)(f"the request does not go on with the sequence: {where}")
        new = [*tokens[len(known) :]]
        if unknown := [token for token in new if not 0 <= token < self._renderer.tokens]:
            raise LedgerError(f"token_ids has {unknown[0]}, and the tokenizer's are 0 to {self._renderer.tokens - 1}")
        if self._pending is not None:
            if new:
                raise Forked(f"a request came while another had no answer: it has {len(new)} tokens more")
        elif self.turns == 0:
            if new:
                raise OtherPrompt(
                    f"the first request has {len(new)} tokens behind the sample's prompt; send the prompt"
                )
            self._pending = self._messages, []
        elif not new:
            raise Forked("the request has no token behind the model's last turn")
        else:
            said: Message = {"role": "user", "content": self._renderer.tokenizer.decode(new)}
            self._pending = [*self._messages, said], new
        return recorded + self._pending[1]

    @property
    def _recorded(self) -> list[int]:
        return [i for segment in self._segments for i in segment.ids.tolist()]

    def count(self, messages: Sequence[Mapping[str, object]], tools: Tools) -> int:
        """Tokens of messages as the template writes them, whatever is recorded."""
        with errors_named("", as_error=LedgerError):
            tools = self._tools if same_tools(tools, self._tools) else tools
            return len(self._renderer.first(read_messages(messages), tools))

    def record(
        self, ids: Sequence[int], logprobs: Sequence[float] | None, version: int, finish_reason: str, message: Message
    ) -> None:
        """The answer to the request: drawn tokens, the log-prob of each (None: unknown), and the message made of them."""
        if self._pending is None:
            raise ValueError("there is no request to record an answer to")
        messages, appended = self._pending
        if appended:
            self._segments.append(Segment(np.asarray(appended, dtype=np.int64)))
        values = np.full(len(ids), np.nan) if logprobs is None else np.asarray(logprobs)
        if len(values) != len(ids):
            raise ValueError(f"{len(ids)} tokens were drawn, and {len(values)} have a log-prob")
        self._segments.append(Segment(np.asarray(ids, dtype=np.int64), values.astype(np.float32), version))
        self._messages = [*messages, *read_messages([message])]
        self._ended = int(ids[-1]) if len(ids) and finish_reason != "length" else None
        self._pending, self.turns = None, self.turns + 1

    @property
    def segments(self) -> list[Segment]:
        """The prompt, and turn by turn what was appended (no log-probs) and what was drawn; a request that has no answer is
        not among them."""
        return list(self._segments)

    @property
    def messages(self) -> list[Message]:
        """The conversation up to the last recorded turn; before it, the prompt."""
        return list(self._messages)

    def room(self, limit: int) -> int:
        """Tokens that may still be drawn where `limit` may follow the prompt in all."""
        waiting = len(self._pending[1]) if self._pending else 0
        return max(0, limit - sum(len(segment.ids) for segment in self._segments[1:]) - waiting)

    def _check_prompt(self, sent: Sequence[Message], tools: Tools) -> None:
        if (where := _first_difference(sent, self._messages)) is not None:
            raise OtherPrompt(
                f"the first request is not the sample's prompt: {where}; send `task.prompt` as it is, and write what an "
                "agent adds (a system prompt, say) into the task's prompts"
            )
        if len(sent) > len(self._messages):
            raise OtherPrompt(
                f"the first request has {len(sent)} messages, and the sample's prompt {len(self._messages)}; send "
                "`task.prompt` as it is"
            )
        if not same_tools(tools, self._tools):
            raise OtherPrompt(
                f"the first request has the tools {_names(tools)}, and the sample {_names(self._tools)}, or describes them "
                "otherwise; send `task.tools`, and give the task's prompts the tools of the agent"
            )

    def _check_retry(self, sent: Sequence[Message], pending: Sequence[Message]) -> None:
        where = _first_difference(sent, pending)
        if where is None and len(sent) == len(pending):
            return
        said = where or f"it has {len(sent)} messages, and the other {len(pending)}"
        raise Forked(f"a request came while another had no answer: {said}; await one answer before the next request")

    def _added(self, sent: Sequence[Message], tools: Tools) -> Sequence[Message]:
        """The messages behind those that are recorded."""
        recorded = self._messages
        if (where := _first_difference(sent, recorded)) is not None:
            raise Forked(f"the request does not go on with the conversation: {where}; {_REMEDY}")
        if not same_tools(tools, self._tools):
            raise Forked(f"the tools are not those of the first request ({_names(self._tools)}); send them with each")
        new = sent[len(recorded) :]
        if not new:
            raise Forked(f"the request has no message behind the model's last turn; {_REMEDY}")
        for i, message in enumerate(new, len(recorded)):
            if message["role"] == "assistant":
                raise Forked(f"messages[{i}] is the assistant's, and the model did not write it; {_REMEDY}")
            if not isinstance(message["content"], str):
                raise LedgerError(f"messages[{i}] has more than text; only a prompt may have images yet")
        return new


def _first_difference(sent: Sequence[Message], recorded: Sequence[Message]) -> str | None:
    """Where messages do not begin with the recorded ones, in words; None where they do."""
    for i, (theirs, ours) in enumerate(zip(sent, recorded, strict=False)):
        if (said := difference(theirs, ours)) is not None:
            return f"messages[{i}]: {said}"
    if len(sent) < len(recorded):
        return f"it has {len(sent)} messages, and there are {len(recorded)}"
    return None


def _names(tools: Tools) -> str:
    functions = [cast(Mapping[str, object], tool.get("function", tool)) for tool in tools or ()]
    return ", ".join(str(function.get("name")) for function in functions) or "none"
