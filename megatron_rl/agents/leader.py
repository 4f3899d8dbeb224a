"""The agents of an engine's open conversations: tasks of one event loop, in a thread of the engine's first rank."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections import Counter
from typing import TypeAlias

import httpx2
from openai import AsyncOpenAI

from megatron_rl.agents.agent_rewards import Rewards
from megatron_rl.agents.endpoint import HttpServer, make_app
from megatron_rl.agents.failures import AgentsFailed, FailedBy, InfrastructureFailed, ModelFailed
from megatron_rl.agents.journal import ConversationJournal, StepJournal
from megatron_rl.agents.policy_client import PolicyClient
from megatron_rl.agents.registry import Agent, AgentTask, RunAgent, Verdict, make_agent
from megatron_rl.agents.rendering import Renderer
from megatron_rl.agents.session import Opening, Patience, Session
from megatron_rl.data.rollout import Rollout
from megatron_rl.data.sample import EVERY_COLUMN
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.rewards.score_checks import place_of
from megatron_rl.rollout.engine import Completion, Failure, Request

Name: TypeAlias = tuple[str, int]
_WAIT = 1.0  # seconds until `collect` returns without anything: other ranks wait in a collective
_SETTLE = 0.005  # seconds that it waits for the next request of a burst, so that these are drawn together
_BURST = 0.05  # seconds, for the whole burst: the engine begins, and the rest joins
_BLOCKED = 60.0  # seconds without a turn of the loop
_LAST_WORDS = 0.5  # seconds
_ATTEMPTS = 2


class AgentLeader:
    """Starts agents, and gathers what they ask."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._arrived: dict[Name, Request | Rollout] = {}
        self._at_work = 0  # conversations whose agent has the word
        self._error: AgentsFailed | None = None
        self._changed = threading.Condition()  # guards the three
        self._sessions: dict[str, Session] = {}
        self._of_rollout: dict[Name, Session] = {}
        self._agents: dict[str, tuple[Agent, Renderer]] = {}  # by task
        self._opened = self._lost_in_a_row = 0
        self._lost = Counter[str]()
        self._loop = asyncio.new_event_loop()
        app = make_app(self._sessions.get)
        self._http = HttpServer(app, self._loop)
        transport = httpx2.ASGITransport(app)
        self._client = httpx2.AsyncClient(transport=transport, trust_env=False, timeout=None)
        self._turned = time.monotonic()  # when the loop last had a turn
        self._loop.call_soon(self._turn)
        self._thread = threading.Thread(target=self._loop.run_forever, name="agents", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------ called by the main thread
    def start(self, opening: Opening, renderer: Renderer, journal: StepJournal | None = None) -> None:
        """Begins a conversation, or goes on with what the journal has of it."""
        if opening.key not in self._agents:
            self._agents[opening.key] = make_agent(opening.agent.name, **opening.agent.params), renderer
        with self._changed:
            self._at_work += 1
        asyncio.run_coroutine_threadsafe(self._converse(opening, journal), self._loop)

    def answer(self, completion: Completion) -> None:
        """Hands the engine's answer to the conversation that asked."""
        with self._changed:
            self._at_work += 1
        self._loop.call_soon_threadsafe(self._of_rollout[completion.request.name].answer, completion)

    def unanswered(self, failure: Failure) -> None:
        """Tells the conversation that asked that the engine has no answer."""
        with self._changed:
            self._at_work += 1
        self._loop.call_soon_threadsafe(self._of_rollout[failure.request.name].unanswered, failure.reason)

    def collect(self, wait: bool) -> list[tuple[Name, Request | Rollout]] | AgentsFailed:
        """Returns what came since the last call, sorted by name; or why the run cannot go on. `wait`: up to `_WAIT` seconds
        for something to come."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._arrived or self._error, _WAIT)
                count, until = 0, time.monotonic() + _BURST
                while self._at_work and count < len(self._arrived) and time.monotonic() < until:
                    count = len(self._arrived)
                    self._changed.wait(_SETTLE)
            arrived, self._arrived = self._arrived, {}
            error = self._error
        return error or self._blocked() or sorted(arrived.items(), key=lambda item: item[0])

    def take_lost(self) -> Counter[str]:
        """Why conversations were lost since the last call."""
        lost, self._lost = self._lost, Counter()
        return lost

    def close(self) -> None:
        """Ends the agents, which have a moment to end what they started."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join(_WAIT)
        if not self._thread.is_alive():
            self._loop.close()

    def _blocked(self) -> AgentsFailed | None:
        seconds = time.monotonic() - self._turned
        if seconds < _BLOCKED:
            return None
        task = asyncio.current_task(self._loop)
        return AgentsFailed(
            f"the agent of {task.get_name() if task else 'a conversation'} has blocked all others for {seconds:.0f} s: it "
            "computes or waits without `await`; call what does with asyncio.to_thread"
        )

    # ----------------------------------------------------------------------------------------------- in the agents' thread
    def _turn(self) -> None:
        self._turned = time.monotonic()
        self._loop.call_later(_WAIT, self._turn)

    async def _end(self) -> None:
        self._http.close()
        await self._client.aclose()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_WORDS)
        self._loop.call_soon(self._loop.stop)

    def _arrive(self, name: Name, what: Request | Rollout) -> None:
        with self._changed:
            self._arrived[name] = what
            self._at_work -= 1
            self._changed.notify()

    async def _converse(self, opening: Opening, journal: StepJournal | None) -> None:
        """A conversation from its first attempt to its rollout."""
        try:
            conversation_journal = ConversationJournal() if journal is None else journal.of(opening)
            rollout = conversation_journal.rollout or await self._rollout(opening, conversation_journal)
        except Exception as error:  # of this package: the main thread raises it, which would wait for ever
            with self._changed:
                self._error = AgentsFailed(f"{_label(opening)}: {type(error).__name__}: {error}")
                self._changed.notify()
            raise
        self._arrive(opening.name, rollout)

    async def _rollout(self, opening: Opening, conversation_journal: ConversationJournal) -> Rollout:
        patience, attempts = Patience(opening.agent.seconds), 0
        while True:
            attempts += 1
            session = self._open(opening, patience, conversation_journal)
            rewards, failed_by, reason = await self._attempt(session, patience)
            session.close()
            await session.idle()
            del self._sessions[session.name], self._of_rollout[opening.name]
            if failed_by != "infrastructure" or patience.left <= 0 or attempts == _ATTEMPTS:
                break
            conversation_journal.begin_again()
        self._count(opening, reason if failed_by == "infrastructure" else None, attempts)
        rollout = session.rollout(rewards, failed_by)
        conversation_journal.keep_end(rollout)
        return rollout

    def _open(self, opening: Opening, patience: Patience, conversation_journal: ConversationJournal) -> Session:
        self._opened += 1
        ask = functools.partial(self._arrive, opening.name)
        renderer = self._agents[opening.key][1]
        session = Session(f"{self._opened}", opening, renderer, self._tokenizer, patience, ask, conversation_journal)
        self._sessions[session.name] = self._of_rollout[opening.name] = session
        return session

    async def _attempt(self, session: Session, patience: Patience) -> tuple[Rewards, FailedBy | None, str | None]:
        """Rewards by column, who failed, and how."""
        opening = session.opening
        agent, _ = self._agents[opening.key]
        task = asyncio.create_task(
            _guarded(agent.run, self._model_of(session), self._task_of(session)), name=_label(opening)
        )
        while not task.done():
            await asyncio.wait({task}, timeout=max(patience.left, 0.0 if patience.is_running else 0.1))
            if not task.done() and patience.left <= 0 and patience.is_running:
                task.add_done_callback(_forget)
                task.cancel()
                return (
                    {},
                    "infrastructure",
                    f"no answer within {opening.agent.seconds:g} s ({opening.key}.agent.seconds)",
                )
        if session.no_answer is not None:  # whatever its agent made of that
            _forget(task)
            return {}, "infrastructure", session.no_answer
        try:
            rewards = session.verdict(task.result())
            if not session.ledger.turns:
                raise InfrastructureFailed("the agent ended without a turn of the policy")
            return rewards, None, None
        except ModelFailed:
            return {EVERY_COLUMN: opening.agent.model_failed}, "model", None
        except InfrastructureFailed as error:
            return {}, "infrastructure", str(error)
        except asyncio.CancelledError:
            return {}, "infrastructure", "the agent was cancelled"
        except Exception as error:  # a user's code: whatever it raises
            if session.failure is not None:
                return {EVERY_COLUMN: opening.agent.model_failed}, "model", None
            cause = f" ({type(error.__cause__).__name__}: {error.__cause__})" if error.__cause__ is not None else ""
            return {}, "infrastructure", f"{type(error).__name__}: {error}{cause}{place_of(error)}"

    def _model_of(self, session: Session) -> AsyncOpenAI:
        """A client bound to the session, without a way through the network."""
        return PolicyClient(
            base_url=f"http://engine/sessions/{session.name}/v1",
            api_key=session.api_key,
            http_client=self._client,
            max_retries=0,
            timeout=None,
        )

    def _task_of(self, session: Session) -> AgentTask:
        opening = session.opening
        items: dict[str, object] = {**opening.sample.as_mapping(), "prompt": opening.messages}
        items |= {"tools": opening.sample.metadata.get("tools"), "seed": opening.turn_seed(0)}
        address = functools.partial(self._address_of, session)
        return AgentTask(items, address, session.api_key, session.given, session.journal.reply)

    def _address_of(self, session: Session) -> str:
        return f"{self._http.address()}/sessions/{session.name}/v1"

    def _count(self, opening: Opening, lost: str | None, attempts: int) -> None:
        self._lost_in_a_row = self._lost_in_a_row + 1 if lost is not None else 0
        if lost is None:
            return
        self._lost[f"{opening.key}: {lost}"] += 1
        if self._lost_in_a_row >= opening.agent.stop_after and self._error is None:
            with self._changed:
                self._error = AgentsFailed(
                    f"{self._lost_in_a_row} conversations in a row were lost ({opening.key}.agent.stop_after), the last one, "
                    f"{_label(opening)}, after {attempts} attempts: {lost}"
                )


def _label(opening: Opening) -> str:
    return f"rollout {opening.index} of {opening.sample.id}"


async def _guarded(run: RunAgent, model: AsyncOpenAI, task: AgentTask) -> Verdict:
    """An agent that would end the process, or this thread, ends its conversation only."""
    try:
        return await run(model, task)
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise InfrastructureFailed(f"the agent raised {type(error).__name__}") from error


def _forget(task: asyncio.Task[Verdict]) -> None:
    if not task.cancelled():
        task.exception()
