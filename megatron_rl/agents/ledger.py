"""One conversation's tokens: what the model was given and what it drew, in one sequence that is only appended to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_rl.agents.rendering import Renderer
from megatron_rl.data.rollout import Segment
from megatron_rl.data.sample import Message, Sample
from megatron_rl.tasks.tokenizing import Tools, as_chat


class LedgerError(ValueError):
    """A request that this conversation cannot go on with. The message is for the agent's author."""


class OtherPrompt(LedgerError):
    """The first request is not the sample's prompt."""


class Forked(LedgerError):
    """A request that does not continue the conversation: it needs a sequence of its own."""


class Ledger:
    """The tokens and messages of a rollout's conversation."""

    def __init__(self, renderer: Renderer, sample: Sample) -> None:
        self._renderer, self._sample = renderer, sample
        self._segments = [Segment(np.asarray(sample.prompt_ids, dtype=np.int64))]
        self._messages: list[Message] = []  # up to the last recorded turn
        self._pending: tuple[list[Message], list[int]] | None = None  # a request's messages, and what it appends
        self._ended: int | None = None  # the token that ended the last turn
        self.turns = 0

    def request(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Tokens to continue: of all that is recorded, and of the messages that are new.

        Raises:
            OtherPrompt: the first request is another.
            Forked: a later one does not begin with what is recorded, or adds nothing that the model may answer.
        """
        new = list(messages)
        if self._pending is None or self._pending[0] != new:
            if self.turns == 0:
                appended: list[int] = []
                if new != as_chat(self._sample.prompt):
                    raise OtherPrompt("the first request's messages are not the sample's prompt")
            else:
                count = len(self._messages)
                if self._pending or new[:count] != self._messages or count == len(new):
                    raise Forked("the messages do not continue the conversation")
                appended = self._renderer.following(new, count, tools, self._ended)
            self._pending = new, appended
        return [int(i) for segment in self._segments for i in segment.ids] + self._pending[1]

    def record(
        self, ids: Sequence[int], logprobs: Sequence[float] | None, version: int, finish_reason: str, message: Message
    ) -> None:
        """The answer to the request: drawn tokens, the log-prob of each (None: unknown), and the message made of them."""
        if self._pending is None:
            raise ValueError("there is no request to record an answer to")
        messages, appended = self._pending
        if appended:
            self._segments.append(Segment(np.asarray(appended, dtype=np.int64)))
        values = np.full(len(ids), np.nan) if logprobs is None else logprobs
        self._segments.append(Segment(np.asarray(ids, dtype=np.int64), np.asarray(values, dtype=np.float32), version))
        self._messages = [*messages, message]
        self._ended = int(ids[-1]) if finish_reason == "stop" else None
        self._pending, self.turns = None, self.turns + 1

    @property
    def segments(self) -> list[Segment]:
        """The prompt, and by turns what was appended (no log-probs) and what was drawn; without a request that waits."""
        return list(self._segments)

    @property
    def messages(self) -> list[Message]:
        """The conversation up to the last recorded turn."""
        return list(self._messages)

    def room(self, limit: int) -> int:
        """Tokens that may still be drawn where `limit` may follow the prompt in all."""
        waiting = len(self._pending[1]) if self._pending else 0
        return max(0, limit - sum(len(segment.ids) for segment in self._segments[1:]) - waiting)
