"""Conversations with the engine: episodes whose turns an agent asks for.

The agents run on the engine's first rank (`leader.py`). Its other ranks are told what was asked, draw the same, and compare
it with what the first one drew. What is drawn is a function of weights, seeds and what the agents say, never of who came
first.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from megatron_rl.agents.failures import AgentsFailed
from megatron_rl.agents.journal import Resumed, StepJournal, origin
from megatron_rl.agents.registry import agent_tasks
from megatron_rl.agents.rendering import Renderer
from megatron_rl.agents.session import Opening
from megatron_rl.config.schema import Config, TaskConfig
from megatron_rl.data.rollout import Rollout
from megatron_rl.data.sample import Sample
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.rollout.engine import Completion, EngineError, Failure, Request
from megatron_rl.rollout.episode import Episode, MakeEpisode, single_turn
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.runtime.distributed import EngineGroup
from megatron_rl.tasks.tokenizing import template_params

if TYPE_CHECKING:
    from megatron_rl.agents.leader import AgentLeader

Name: TypeAlias = tuple[str, int]


class Conversations:
    """This rank's part in the conversations of its engine, whose ranks all make the same calls in the same order."""

    def __init__(self, config: Config, group: EngineGroup, tokenizer: Tokenizer) -> None:
        self._config, self._seed, self._group, self._tokenizer = config, config.seed, group, tokenizer
        self._tasks: Mapping[str, tuple[str, TaskConfig]] = {
            key.rpartition(".")[2]: (key, task) for key, task in agent_tasks(config).items()
        }
        self._renderers: dict[str, Renderer] = {}
        self._open: dict[Name, Conversation] = {}
        self._read = Counter[str]()
        self._leader: AgentLeader | None = None
        self._journal: StepJournal | None = None  # on the engine's first rank
        if group.is_leader:
            from megatron_rl.agents.leader import AgentLeader  # with openai's client, which other ranks do without

            self._leader = AgentLeader(tokenizer)

    def episodes(
        self,
        sampling: Sampling,
        step: int,
        version: int,
        journal: tuple[Path, str] | None = None,
        of_experts: np.dtype | None = None,
    ) -> MakeEpisode:
        """Conversations about the prompts of tasks with an agent, one response to any other.

        Args:
            version: of the weights.
            journal: the folder of the step's journals, and what tells the weights' bits from others; None: nothing is
                recorded.
            of_experts: `Engine.experts`.
        """
        self._keep(journal, step, version)
        single = single_turn(sampling, self._seed, step)

        def make(sample: Sample, index: int) -> Episode:
            if sample.agent is None:
                return single(sample, index)
            key, task = self._tasks[sample.agent]
            assert task.agent is not None
            opening = Opening(sample, index, sampling, self._seed, step, key, task.agent, version, of_experts)
            self._open[opening.name] = Conversation(self, opening)
            return self._open[opening.name]

        return make

    def begin(self, opening: Opening) -> None:
        if self._leader is not None:
            key, task = self._tasks[opening.sample.agent or ""]
            if key not in self._renderers:
                self._renderers[key] = Renderer(self._tokenizer, template_params(task))
            self._leader.start(opening, self._renderers[key], self._journal)

    def answer(self, completion: Completion) -> None:
        self._read["tokens"] += len(completion.request.tokens)
        self._read["cached"] += completion.cached_tokens
        if self._leader is not None:
            self._leader.answer(completion)

    def unanswered(self, failure: Failure) -> None:
        if self._leader is not None:
            self._leader.unanswered(failure)

    def poll(self, wait: bool) -> list[tuple[Name, Request | Rollout]]:
        """As `rollout.episode.Poll`.

        Raises:
            AgentsFailed: on every rank of the engine.
            EngineError: this rank drew other tokens than the engine's first.
        """
        came: list[tuple[Name, Request | Rollout, bytes]] | AgentsFailed = []
        if self._leader is not None:
            arrived = self._leader.collect(wait)
            came = arrived if isinstance(arrived, AgentsFailed) else [self._sent(*item) for item in arrived]
        came = self._group.broadcast(came)
        if isinstance(came, AgentsFailed):
            raise came
        return [self._received(*item) for item in came]

    def _sent(self, name: Name, what: Request | Rollout) -> tuple[Name, Request | Rollout, bytes]:
        """Returns what is sent: without images, which every rank has, and with a hash of what was drawn."""
        return name, replace(what, images=None) if isinstance(what, Request) else what, self._open[name].drawn.digest()

    def _received(self, name: Name, what: Request | Rollout, drawn: bytes) -> tuple[Name, Request | Rollout]:
        conversation = self._open[name]
        if drawn != conversation.drawn.digest():
            raise EngineError(
                f"rank {self._group.rank} of engine {self._group.index} has drawn other tokens than its first rank in "
                f"rollout {name[1]} of {name[0]}: its ranks must run the same build of vLLM on the same kind of device"
            )
        if isinstance(what, Request):
            return name, replace(what, images=conversation.opening.sample.images)
        del self._open[name]
        return name, what

    def _keep(self, journal: tuple[Path, str] | None, step: int, version: int) -> None:
        """Goes on with the step's journal, or begins it."""
        if self._leader is None or (journal and self._journal and journal[0] == self._journal.folder):
            return
        if self._journal is not None:
            self._journal.close()
        self._journal = None
        if journal is not None:
            folder, weights = journal
            self._journal = StepJournal(folder, self._group.index, origin(self._config, step, version, weights))

    def take_resumed(self) -> Resumed:
        """Counts of what was found in journals since the last call; on the engine's first rank."""
        return Resumed() if self._journal is None else self._journal.take_resumed()

    def take_lost(self) -> Counter[str]:
        """Why conversations of this engine were lost since the last call; on its first rank."""
        return Counter() if self._leader is None else self._leader.take_lost()

    def take_read(self) -> Counter[str]:
        """Returns how many `tokens` requests had that ended since the last call, and of how many the engine still had keys
        and values, `cached`; on its first rank."""
        read, self._read = self._read, Counter[str]()
        return read if self._group.is_leader else Counter()

    def close(self) -> None:
        if self._leader is not None:
            self._leader.close()
        if self._journal is not None:
            self._journal.close()


class Conversation:
    """An `Episode` whose requests and rollout come by `Conversations.poll`."""

    def __init__(self, host: Conversations, opening: Opening) -> None:
        self._host, self.opening = host, opening
        self.drawn = hashlib.blake2b(digest_size=8)  # of all that was drawn for it, dropped turns too

    def first(self) -> None:
        self._host.begin(self.opening)

    def advance(self, completion: Completion) -> None:
        self.drawn.update(np.asarray(completion.ids, dtype=np.int64).tobytes())
        self._host.answer(completion)

    def unanswered(self, failure: Failure) -> bool:
        self._host.unanswered(failure)
        return True
