"""One attempt at a rollout's conversation with the engine: its tokens, its limits and the turn that is under way.

Everything here runs in the thread of the agents (`leader.py`), on the engine's first rank.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, cast

import numpy as np

from megatron_rl.agents.agent_rewards import Rewards, check_turns, of_turns, rewards_of, totals
from megatron_rl.agents.failures import FailedBy, InfrastructureFailed, ModelFailed
from megatron_rl.agents.journal import ConversationJournal
from megatron_rl.agents.ledger import Ledger, LedgerError, TooManySequences
from megatron_rl.agents.registry import Verdict
from megatron_rl.agents.rendering import Renderer
from megatron_rl.agents.replies import read_reply, turn_text
from megatron_rl.base.messages import errors_named
from megatron_rl.config.schema import AgentConfig
from megatron_rl.data.rollout import Rollout, Segment
from megatron_rl.data.sample import Message, Sample
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.rewards.tool_parsers import THINK
from megatron_rl.rollout.engine import Completion, Request
from megatron_rl.rollout.sampling import Sampling, rollout_seed
from megatron_rl.tasks.tokenizing import as_chat

Tools = Sequence[Mapping[str, object]]
_TAIL = 8  # tokens of a prompt that may say that the policy begins within its thinking


class RefusedTurn(Exception):
    """A request without an answer. `status` and `code`: as the endpoint says it."""

    def __init__(self, text: str, code: str, status: int = 400) -> None:
        super().__init__(text)
        self.code, self.status = code, status


@dataclass(frozen=True)
class Opening:
    """The beginning of a rollout's conversation.

    Attributes:
        sampling: `max_tokens` is the limit of all that follows the prompt.
        key: of the task that has the agent, such as `tasks.train.house`.
        version: of the engine's weights.
        of_experts: `Engine.experts`.
    """

    sample: Sample
    index: int
    sampling: Sampling
    seed: int
    step: int
    key: str
    agent: AgentConfig
    version: int
    of_experts: np.dtype | None = None

    @property
    def name(self) -> tuple[str, int]:
        return self.sample.id, self.index

    @property
    def messages(self) -> list[Message]:
        """The prompt."""
        return list(as_chat(self.sample.prompt))

    def turn_seed(self, turn: int) -> int:
        return rollout_seed(self.seed, self.step, self.sample.id, self.index, turn)

    def seed_of(self, place: Sequence[int]) -> int:
        """The seed of the turn at a place of the ledger's tree; of a conversation that only goes on that of its number."""
        if not any(place):
            return self.turn_seed(len(place) - 2)
        return rollout_seed(self.seed, self.step, self.sample.id, self.index, tree_place=place)


class Patience:
    """The seconds that a conversation may still wait for its agent. The clock stands while the engine has its request."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._left, self._since = clock, seconds, clock()
        self.is_running = True

    @property
    def left(self) -> float:
        return self._left - (self._clock() - self._since if self.is_running else 0.0)

    def stand(self) -> None:
        self._left, self.is_running = self.left, False

    def run(self) -> None:
        if not self.is_running:
            self._since, self.is_running = self._clock(), True


@dataclass(frozen=True)
class PolicyTurn:
    """A turn of the policy as OpenAI's message, and as the tokens that it was asked with and drawn as."""

    turn: int
    message: Message
    finish_reason: str  # stop | length | tool_calls
    prompt_ids: Sequence[int]
    ids: Sequence[int]
    logprobs: Sequence[float] | None  # of each of `ids`; None: the engine does not say


@dataclass
class _Turn:
    """The request that is under way. `question`: its messages and tools, or its tokens."""

    question: object
    reads_calls: bool
    tokens: Sequence[int]  # before it
    reply: asyncio.Future[PolicyTurn]


class Session:
    """A conversation that is open. An agent knows it by its name and its key.

    Args:
        ask: hands a request to the engine.
        journal: the conversation's; None: nothing is recorded.
    """

    def __init__(
        self,
        name: str,
        opening: Opening,
        renderer: Renderer,
        tokenizer: Tokenizer,
        patience: Patience,
        ask: Callable[[Request], None],
        journal: ConversationJournal | None = None,
    ) -> None:
        self.name, self.opening, self.api_key = name, opening, secrets.token_urlsafe(24)
        renders = opening.agent.history == "rendered"
        self.ledger = Ledger(renderer, opening.sample, opening.agent.sequences, renders, opening.of_experts)
        self.failure: ModelFailed | None = None  # the first limit that the policy reached
        self.no_answer: str | None = None  # why the last request has none
        self.is_closed = False
        self._tokenizer, self._patience, self._ask = tokenizer, patience, ask
        self.journal = journal or ConversationJournal()
        self._under_way: _Turn | None = None
        self._last: tuple[object, PolicyTurn] | None = None
        self.replied: dict[str, list[Message]] = {}  # replies that a request may name, and what was said up to each
        self._finish_reason, self._text = "stop", ""  # of the last turn
        self._given: Rewards | None = None
        self._was_given = asyncio.Event()

    # ----------------------------------------------------------------------------------------------------- the agent's
    async def complete(
        self,
        messages: Sequence[Message],
        tools: Tools | None,
        *,
        reads_calls: bool = True,
        max_tokens: int | None = None,
        is_retry: bool = False,
    ) -> PolicyTurn:
        """The policy's turn after these messages.

        Args:
            reads_calls: tool calls are read from its text.
            max_tokens: of this turn, at most; the task and the rollout have limits of their own.
            is_retry: the client had no answer to the same request, and sends it again.

        Raises:
            RefusedTurn: the conversation has ended, parts in two, or has reached a limit.
        """
        question = (list(messages), None if tools is None else list(tools))
        return await self._turn(question, lambda: self.ledger.request(*question), reads_calls, max_tokens, is_retry)

    async def go_on(
        self, tokens: Sequence[int], *, max_tokens: int | None = None, is_retry: bool = False
    ) -> PolicyTurn:
        """The policy's turn after these tokens: all that are recorded, and new ones behind. Its calls are text.

        Raises:
            RefusedTurn: as in `complete`.
        """
        question = list(tokens)
        return await self._turn(question, lambda: self.ledger.request_tokens(question), False, max_tokens, is_retry)

    async def _turn(
        self, question: object, tokens: Callable[[], list[int]], reads_calls: bool, most: int | None, is_retry: bool
    ) -> PolicyTurn:
        if self.is_closed:
            raise _ended()
        if self._under_way is not None:
            if question != self._under_way.question:
                raise RefusedTurn(
                    "a request of this session is under way, and this is another one: limits count the turns before, so ask "
                    "one turn at a time",
                    "forked",
                )
            return await asyncio.shield(self._under_way.reply)
        if is_retry and self._last is not None and question == self._last[0]:
            return self._last[1]
        request = self._request(tokens, most)
        reply = asyncio.get_running_loop().create_future()
        reply.add_done_callback(_retrieve)  # its agent may be gone
        self._under_way = _Turn(question, reads_calls, request.tokens, reply)
        self._patience.stand()
        if (recorded := self.journal.turn(request)) is not None:
            self._take(recorded)
        else:
            self._ask(request)
        return await asyncio.shield(reply)

    def up_to(self, reply: str | None) -> list[Message]:
        """The messages up to a reply of this session, with it; none for None."""
        if reply is not None and reply not in self.replied:
            raise RefusedTurn(f"this session has no response {reply!r:.80}", "previous_response_not_found")
        return [] if reply is None else self.replied[reply]

    def count(self, messages: Sequence[Message], tools: Tools | None) -> int:
        """The tokens of these messages as the chat template writes them, with the beginning of the policy's turn."""
        try:
            return self.ledger.count(messages, tools)
        except ValueError as error:
            raise RefusedTurn(str(error), "invalid_messages") from error

    def give(self, verdict: object) -> None:
        """Takes a program's word for what the conversation was worth. The same again is the same."""
        if self.is_closed:
            raise _ended()
        try:
            rewards = rewards_of(cast(Verdict, verdict))
        except ValueError as error:
            raise RefusedTurn(f"`reward` is {error}", "invalid_reward") from error
        if self._given is not None and str(self._given) != str(rewards):  # NaN differs from NaN
            raise RefusedTurn(f"this conversation has been given {self._given} already", "reward_given")
        self._given = rewards
        self._was_given.set()

    async def given(self) -> Rewards:
        """Waits for `give`, and returns its rewards."""
        await self._was_given.wait()
        assert self._given is not None
        return dict(self._given)

    def verdict(self, returned: Verdict) -> Rewards:
        """The rewards, which the agent has returned or a program has given.

        Raises:
            InfrastructureFailed: it is no reward, there are two, or a list has not one number per turn.
        """
        try:
            rewards = rewards_of(returned)
        except ValueError as error:
            raise InfrastructureFailed(f"the agent returned {error}") from error
        if returned is not None and self._given is not None and str(self._given) != str(rewards):
            raise InfrastructureFailed(f"the agent returned {rewards}, and a program gave {self._given}")
        rewards = rewards if returned is not None or self._given is None else self._given
        with errors_named("", as_error=InfrastructureFailed):
            check_turns(rewards, self.ledger.turns)
        return rewards

    def _request(self, asked: Callable[[], list[int]], most: int | None) -> Request:
        """The next turn's. Within the limits, or RefusedTurn."""
        opening, turn = self.opening, self.ledger.turns
        try:
            tokens = asked()
        except TooManySequences as error:
            self._limit("sequence_limit", f"{error} ({opening.key}.agent.sequences)")
        except LedgerError as error:
            raise RefusedTurn(str(error), "forked") from error
        except ValueError as error:  # the template, or the tokenizer
            raise RefusedTurn(str(error), "invalid_messages") from error
        if turn >= opening.agent.max_turns:
            self._limit("turn_limit", f"the conversation has had its {turn} turns ({opening.key}.agent.max_turns)")
        room = self.ledger.room(opening.sampling.max_tokens)
        if room <= 0:
            self._finish_reason = "length"
            self._limit(
                "context_length_exceeded",
                f"the conversation has used its {opening.sampling.max_tokens} tokens behind the prompt (rollout.max_tokens)",
            )
        room = min(limit for limit in (room, opening.agent.turn_tokens, most) if limit is not None)
        seed = opening.seed_of(self.ledger.place) if opening.sampling.temperature > 0 else None
        sampling = Sampling(opening.sampling.temperature, opening.sampling.top_p, room)
        return Request(opening.name, tokens, sampling, seed, images=opening.sample.images)

    def _limit(self, code: str, text: str) -> NoReturn:
        self.failure = self.failure or ModelFailed(text)
        raise RefusedTurn(text, code)

    # ----------------------------------------------------------------------------------------------------- the engine's
    def answer(self, completion: Completion) -> None:
        """Records a turn, and hands it to the agent. One that nobody waits for any more is dropped."""
        if completion.experts is not None:
            completion = replace(completion, experts=completion.experts[self.ledger.routed :])
        self._take(completion)

    def _take(self, completion: Completion) -> None:
        """Takes a turn, whose experts are those that the ledger lacks."""
        turn, self._under_way = self._under_way, None
        assert turn is not None  # the engine answers what it was asked
        self._patience.run()
        self.no_answer = None
        if self.is_closed:
            turn.reply.set_exception(_ended())
            return
        self.journal.keep_turn(completion)
        number, ids, ending = self.ledger.turns, list(completion.ids), completion.finish_reason
        parser = self.opening.agent.parser if turn.reads_calls else "none"
        thinking = self._tokenizer.decode(turn.tokens[-_TAIL:]).rstrip().endswith(THINK)
        text = turn_text(self._tokenizer, ids, ending)
        tools = cast(Tools | None, self.opening.sample.metadata.get("tools"))
        read = read_reply(text, ending, None if parser == "none" else parser, number, thinking, tools)
        self.ledger.record(ids, completion.logprobs, completion.version, ending, read.message, completion.experts)
        self._finish_reason, self._text = ending, read.text
        if read.unread:
            self.failure = self.failure or ModelFailed(f"turn {number} has calls that cannot be read")
            turn.reply.set_exception(RefusedTurn(str(self.failure), "unreadable_call"))
            return
        logprobs = None if completion.logprobs is None else list(map(float, completion.logprobs))
        reply = PolicyTurn(number, read.message, read.finish_reason, turn.tokens, ids, logprobs)
        self._last = (turn.question, reply)
        turn.reply.set_result(reply)

    def unanswered(self, reason: str) -> None:
        """The engine, a server elsewhere, has no answer. The agent may send the same request again."""
        turn, self._under_way = self._under_way, None
        assert turn is not None
        self._patience.run()
        self.no_answer = f"the server did not answer: {reason}"
        turn.reply.set_exception(_ended() if self.is_closed else RefusedTurn(self.no_answer, "unanswered", 503))

    # -------------------------------------------------------------------------------------------------------- the end
    def close(self) -> None:
        """No further turn; one that is under way at the engine is dropped when it comes."""
        self.is_closed = True

    async def idle(self) -> None:
        """Returns once the engine has nothing of this session."""
        while self._under_way is not None:
            await asyncio.wait({self._under_way.reply})

    def rollout(self, rewards: Rewards, failed_by: FailedBy | None) -> Rollout:
        """The rollout to train on: all turns that were recorded; none where the infrastructure failed."""
        opening, lost = self.opening, failed_by == "infrastructure"
        none_drawn = [
            Segment(np.asarray(opening.sample.prompt_ids, dtype=np.int64)),
            Segment(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32), opening.version),
        ]
        conversations = [] if lost else self.ledger.conversations
        is_cut = self._finish_reason == "length" or (len(conversations) > 1 and self.ledger.is_cut)
        return Rollout(
            opening.sample.id,
            opening.index,
            none_drawn if lost else self.ledger.segments,
            "length" if is_cut and not lost else "stop",
            experts=self._no_experts() if lost else self.ledger.experts,
            conversations=conversations if len(conversations) > 1 else [],
            messages=opening.messages if lost or not self.ledger.turns else self.ledger.messages,
            last_turn="" if lost else self._text,
            agent_rewards=totals(rewards),
            turn_rewards=of_turns(rewards),
            failed_by=failed_by,
        )

    def _no_experts(self) -> np.ndarray | None:
        """Returns zeros for a prompt that nothing was drawn behind."""
        dtype = self.opening.of_experts
        return None if dtype is None else np.zeros(len(self.opening.sample.prompt_ids), dtype)


def _ended() -> RefusedTurn:
    return RefusedTurn("this conversation has ended", "session_closed", 410)


def _retrieve(reply: asyncio.Future[PolicyTurn]) -> None:
    if not reply.cancelled():
        reply.exception()
