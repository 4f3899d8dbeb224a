"""Sampling: prompts in their order, the engine that draws responses to them, and the scorer of these."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from megatron_rl.agents.host import Conversations
from megatron_rl.agents.journal import Resumed
from megatron_rl.config.schema import Config
from megatron_rl.data.images import PromptImages
from megatron_rl.data.like_lengths import LikeLengths
from megatron_rl.data.rewards import RewardTable
from megatron_rl.data.rollout import Rollout, Rollouts, scored_sample
from megatron_rl.data.sample import Sample
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.rewards import Scorer
from megatron_rl.rollout.ahead import Batch
from megatron_rl.rollout.dispatch import Dispatcher
from megatron_rl.rollout.engine import Engine, Failure
from megatron_rl.rollout.episode import MakeEpisode, Poll, single_turn
from megatron_rl.rollout.generate import generate
from megatron_rl.rollout.partial import Waiting, unpack
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.runtime.distributed import ProcessGrid
from megatron_rl.runtime.heartbeat import HEARTBEAT
from megatron_rl.runtime.step_timer import StepTimer
from megatron_rl.tasks import Order, Prompts, make_order
from megatron_rl.trainer.partial_sampling import sample_partial
from megatron_rl.trainer.report import Reporter
from megatron_rl.trainer.resampling import distinct, sample_with_signal
from megatron_rl.trainer.shown import decode
from megatron_rl.trainer.state import State
from megatron_rl.trainer.step_counts import StepCounts
from megatron_rl.trainer.turn_credit import turn_rewards, turns_of


class Sampler:
    """This rank's share of sampling and scoring. `folder`: Hugging Face folder with config and tokenizer."""

    def __init__(
        self,
        config: Config,
        grid: ProcessGrid,
        folder: Path,
        tokenizer: Tokenizer,
        prompts: Prompts,
        scorer: Scorer,
        report: Reporter,
        timer: StepTimer,
    ) -> None:
        self.config, self.grid, self.folder, self.tokenizer = config, grid, folder, tokenizer
        self.prompts, self.scorer = prompts, scorer
        self._report, self.timer = report, timer
        self.order: Order | None = None  # of the training prompts; None in an evaluation
        if prompts.train:
            self.order = make_order([sample.task for sample in prompts.train], prompts.weights, config.seed)
        self._counters: dict[str, float] = {}  # of the current step
        self._counts = StepCounts()  # beside them, as of its evaluation
        self._lengths: dict[str, float] = {}  # mean tokens of the last responses to a prompt, by sample id
        self._engine: Engine | None = None  # until `use`
        self.max_scored = 0  # tokens of the longest sequence that the check of a weight sync takes; until `use`
        self._conversations: Conversations | None = None  # until a prompt has an agent
        self._read = Counter[str]()  # see `Conversations.take_read`; of all engines, in the current step
        self.journal: Path | None = None  # where training's conversations are recorded, to go on with after a kill
        self.weights = ""  # tells the bits of the engine's weights from others, where there is a journal

    # ------------------------------------------------------------------------------------------------------ the engine
    def use(self, engine: Engine) -> None:
        """Samples with this engine from here on; it ends with the sampler."""
        self._engine, self._dispatcher = engine, Dispatcher(self.grid, engine.room)
        self.max_scored = engine.max_scored

    @property
    def has_engine(self) -> bool:
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "no engine has been started"
        return self._engine

    def sequences_to_check(
        self, rollouts: Rollouts | None = None
    ) -> tuple[list[Sequence[int]], list[PromptImages | None]]:
        """The sequences whose log-probs the check after a weight sync compares, and their images: a few rollouts; None: the
        recipe's first prompts. The same on every rank."""
        count = self.config.rollout.sync_check_rollouts
        if rollouts is None:
            prompts = self.prompts.train or [s for samples in self.prompts.eval.values() for s in samples]
            samples, sequences = prompts[:count], [sample.prompt_ids for sample in prompts[:count]]
        else:
            rows = range(len(rollouts))[:: max(1, len(rollouts) // count)][:count]
            samples, sequences = [rollouts.sample(row) for row in rows], self._sequences(rollouts, rows)
        scored = [
            (tokens[: self.max_scored], sample.images)
            for tokens, sample in zip(sequences, samples, strict=True)
            if len(tokens) > 1
        ]
        return [tokens for tokens, _ in scored], [images for _, images in scored]

    def _sequences(self, rollouts: Rollouts, rows: Sequence[int]) -> list[list[int]]:
        """The tokens of a few rollouts, on every rank."""
        chosen = rollouts.facts[list(rows)]
        flat = np.zeros(chosen["num_tokens"].sum(), dtype=np.int32)
        parts = np.split(flat, np.cumsum(chosen["num_tokens"])[:-1])
        for row, source, part in zip(rows, chosen["source"].tolist(), parts, strict=True):
            if source == self.grid.rank:
                part[:] = rollouts.held[row].tokens
        self.grid.sum_array(flat)
        return [part.tolist() for part in parts]

    def close(self) -> None:
        self.scorer.close()
        if self._conversations is not None:
            self._conversations.close()
        if self._engine is not None:
            self._engine.shutdown()

    # -------------------------------------------------------------------------------------------------------- sampling
    def training_prompt(self, position: int) -> Sample:
        """Returns the prompt at a position in the order of the training prompts."""
        return self.training_prompts(position, 1)[0]

    def training_prompts(self, position: int, count: int) -> list[Sample]:
        """Returns the prompts from a position on."""
        assert self.order is not None  # an evaluation takes no training prompts
        return [self.prompts.train[i] for i in self.order.take(position, count)]

    def read_waiting(self, path: Path) -> Waiting:
        """Reads what waits in a checkpoint."""
        return unpack(path.read_bytes(), self.grid, self.training_prompt)

    def sample(self, step: int, state: State) -> tuple[Rollouts, State]:
        """A group of scored rollouts of each of the next prompts; and the state with these prompts taken.

        With dynamic sampling (`algorithm.resample_rounds`) groups without signal are replaced.
        """
        config = self.config
        self.scorer.begin_step(step)
        self._read.clear()
        if config.rollout.partial is not None:
            with self.timer("generate"):
                drawn, state, metrics = sample_partial(self, step, state)
            self._counters |= metrics
            with self.timer("reward"):
                self.score(drawn, by_token=True)
            return drawn, state
        if config.algorithm.resample_rounds:
            drawn, state, metrics = sample_with_signal(self, step, state)
            self._counters |= metrics
            return drawn, state
        if config.trainer.like_lengths > 1 or state.by_length is not None:
            return self._sample_of_like_lengths(step, state)
        count = config.trainer.prompts_per_step
        drawn = self.scored_groups(distinct(self.training_prompts(state.position, count), []), step)
        return drawn, replace(state, position=state.position + count)

    def _sample_of_like_lengths(self, step: int, state: State) -> tuple[Rollouts, State]:
        """`sample`; remembers how long responses are. Where the recipe no longer wants it, the queue is drawn to its end."""
        trainer, train = self.config.trainer, self.prompts.train
        assert self.order is not None
        by_length = state.by_length or LikeLengths.unknown([sample.id for sample in train])
        places, by_length, position = by_length.next_step(
            self.order.take, state.position, trainer.prompts_per_step, trainer.like_lengths, self.config.seed
        )
        drawn = self.scored_groups(distinct([train[place] for place in places], []), step)
        by_length = by_length.learned({place: self._lengths[train[place].id] for place in places})
        return drawn, replace(state, position=position, by_length=by_length)

    def batch(self, step: int, state: State, greedy: bool, stop: Callable[[], None]) -> tuple[Batch, State]:
        """A step's scored rollouts, and the state with their prompts taken. `greedy`: beside them one greedy rollout of each
        prompt. `stop`: called where sampling may end for good."""
        rollouts, state = self.sample(step, state)
        stop()
        drawn_greedily = self.sample_greedily(rollouts.samples, step) if greedy else None
        stop()
        return Batch(rollouts, drawn_greedily), state

    def scored_groups(self, samples: Sequence[Sample], step: int) -> Rollouts:
        """A step's scored groups of these prompts."""
        sampling = Sampling(self.config.rollout.temperature, 1.0, self.config.rollout.max_tokens)
        drawn = self._scored_rollouts(samples, self.config.rollout.group_size, sampling, step, by_token=True)
        if self.config.algorithm.credit == "turn":
            drawn.turns = turns_of(self.grid, drawn)
        self._counters["rollouts/sampled"] = self._counters.get("rollouts/sampled", 0) + len(drawn)
        if self._read:
            self._counters["conversation/prefix_hit_share"] = self._read["cached"] / self._read["tokens"]
        return drawn

    def sample_greedily(self, samples: Sequence[Sample], step: int) -> Rollouts:
        """One scored greedy rollout per sample (ReMax's baseline)."""
        return self._scored_rollouts(samples, 1, Sampling(0.0, 1.0, self.config.rollout.max_tokens), step)

    def _scored_rollouts(
        self, samples: Sequence[Sample], count: int, sampling: Sampling, step: int, by_token: bool = False
    ) -> Rollouts:
        with self.timer("generate"):
            rollouts = self.generate(samples, count, sampling, step, by_token=by_token, journaled=True)
        with self.timer("reward"):
            self.score(rollouts, by_token)
        return rollouts

    def generate(
        self,
        samples: Sequence[Sample],
        count: int,
        sampling: Sampling,
        step: int,
        already_drawn: Mapping[tuple[str, int], Rollout] | None = None,
        on_drawn: Callable[[Rollout], None] | None = None,
        on_failed: Callable[[Failure], None] | None = None,
        by_token: bool = False,
        journaled: bool = False,
    ) -> Rollouts:
        """`count` rollouts per sample; those of this rank's engine decoded.

        The recipe's slow rewards start with each rollout that ends, while others are still being generated.

        Args:
            already_drawn: rollouts that are not drawn again, by sample id and index; the same on every rank.
            on_drawn: called with each newly drawn rollout of this rank's engine.
            on_failed: as for `generate`.
            by_token: rewards per token start too.
            journaled: conversations are recorded, and go on with what was recorded before a kill.
        """
        HEARTBEAT.samples = [sample.id for sample in samples]
        start_scoring = self._scoring_starter(samples, by_token)

        def on_finished(rollout: Rollout) -> None:
            start_scoring(rollout)
            if on_drawn is not None:
                on_drawn(rollout)

        conversations = self._conversations_about(samples)
        make_episode = single_turn(sampling, self.config.seed, step)
        if conversations is not None:
            journal = (self.journal / f"step_{step}", self.weights) if journaled and self.journal is not None else None
            make_episode = conversations.episodes(sampling, step, self.engine.version, journal, self.engine.experts)
        poll = None if conversations is None else conversations.poll
        rollouts = self.draw(samples, count, make_episode, on_finished, on_failed, already_drawn, poll=poll)
        if conversations is not None:
            parts = self.grid.all_gather(
                (conversations.take_lost(), conversations.take_read(), conversations.take_resumed())
            )
            self._report.lost_conversations([lost for lost, _, _ in parts])
            self._read += sum((read for _, read, _ in parts), Counter[str]())
            self._report.resumed_conversations(step, sum((resumed for _, _, resumed in parts), Resumed()))
        decode(self.tokenizer, [*rollouts.held.values()])
        return rollouts

    def draw(
        self,
        samples: Sequence[Sample],
        count: int,
        make_episode: MakeEpisode,
        on_finished: Callable[[Rollout], None] = lambda rollout: None,
        on_failed: Callable[[Failure], None] | None = None,
        already_drawn: Mapping[tuple[str, int], Rollout] | None = None,
        begun: Mapping[int, int] | None = None,
        poll: Poll | None = None,
    ) -> Rollouts:
        """`rollout.generate.generate` by this run's engines; remembers how long responses are."""
        lengths = self._lengths
        by = self.engine, self._dispatcher, samples, count, make_episode, on_finished, on_failed, already_drawn, lengths
        rollouts = generate(*by, poll=poll, begun=begun)
        if (drafts := self.engine.drafts) is not None:
            engine = self.grid.engine
            for rank, counts in enumerate(self.grid.all_gather(drafts.take_counts())):
                self._counts.drafts += counts if rank % engine.size == 0 else Counter()
        means = rollouts.facts["length"].reshape(-1, count).mean(1).tolist()
        self._lengths |= {sample.id: mean for sample, mean in zip(samples, means, strict=True)}
        return rollouts

    def _conversations_about(self, samples: Sequence[Sample]) -> Conversations | None:
        """Agents, where one converses about any of the prompts."""
        if all(sample.agent is None for sample in samples):
            return None
        if self._conversations is None:
            self._conversations = Conversations(self.config, self.grid.engine, self.tokenizer)
        return self._conversations

    # --------------------------------------------------------------------------------------------------------- scoring
    def _scoring_starter(self, samples: Sequence[Sample], by_token: bool) -> Callable[[Rollout], None]:
        """Starts the slow rewards of a rollout that has ended, where a reward is slow."""
        if not self.scorer.starts_early:
            return lambda rollout: None
        by_id = {sample.id: sample for sample in samples}

        def start(rollout: Rollout) -> None:
            decode(self.tokenizer, [rollout])
            if self._scores(rollout):
                key, sample = (rollout.sample_id, rollout.index), scored_sample(by_id[rollout.sample_id], rollout)
                drawn = rollout if by_token else None
                self.scorer.start(key, rollout.text, sample, rollout.finish_reason, rollout.length, drawn)

        return start

    def _scores(self, rollout: Rollout) -> bool:
        """Whether this rank scores a rollout that its engine drew. Equal responses to a prompt go to the same rank; nobody
        scores a conversation that was lost."""
        if rollout.failed_by == "infrastructure":
            return False
        engine = self.grid.engine
        text = f"{rollout.sample_id}/{rollout.text}".encode(errors="replace")
        return zlib.crc32(text) % engine.size == engine.rank

    def score(self, rollouts: Rollouts, by_token: bool = False) -> None:
        """Fills in the rewards of all rollouts on every rank. The ranks of an engine share the scoring of what it drew.

        `by_token`: the rewards per token as well, on the rank that scored a rollout, which then hands it out, with means as
        further columns. Where tokens have rewards they were drawn in training: greedy decoding and evaluations have none.
        """
        share = [(row, rollout) for row, rollout in sorted(rollouts.held.items()) if self._scores(rollout)]
        HEARTBEAT.samples = [rollout.sample_id for _, rollout in share]
        rewards = self.scorer.score(
            [rollout.text for _, rollout in share],
            [scored_sample(rollouts.sample(row), rollout) for row, rollout in share],
            [rollout.finish_reason for _, rollout in share],
            [rollout.length for _, rollout in share],
            [(rollout.sample_id, rollout.index) for _, rollout in share],
            [rollout for _, rollout in share] if by_token else None,
        )
        rollouts.token_weights = self.scorer.token_weights if by_token else {}
        columns = (*self.scorer.columns, *rollouts.token_weights)
        dtype = np.dtype([("row", "<i4"), ("rewards", "<f8", (len(columns),))])
        scored = [(row, tuple(values.values())) for (row, _), values in zip(share, rewards, strict=True)]
        parts = self.grid.all_gather_bytes(np.array(scored, dtype=dtype).tobytes())
        everything = np.frombuffer(b"".join(parts), dtype=dtype)
        for rank, part in enumerate(parts if rollouts.token_weights else ()):
            rollouts.facts["source"][np.frombuffer(part, dtype=dtype)["row"]] = rank
        rollouts.columns, rollouts.rewards = columns, np.full((len(rollouts), len(columns)), np.nan)
        rollouts.rewards[everything["row"]] = everything["rewards"]
        stats = self.scorer.take_stats()
        for report in self.grid.all_gather(stats) if self.scorer.starts_early else [stats]:
            self.scorer.learn(report)
            self._counts.scoring += report
        self._report.missing_scores(self._counts.scoring)

    def take_counters(self) -> dict[str, float]:
        """Metrics of sampling and scoring since the last call."""
        counters, counts = self.take_counts()
        return counters | counts.metrics()

    def take_counts(self) -> tuple[dict[str, float], StepCounts]:
        """The same, with what an evaluation counts too still as counts."""
        taken = self._counters, self._counts
        self._counters, self._counts = {}, StepCounts()
        return taken

    def reward_table(self, rollouts: Rollouts, greedy: Rollouts | None = None) -> RewardTable:
        """A step's rewards, [prompts, group size, columns]; float64. `greedy`: one scored greedy rollout per sample."""
        n, m, names = len(rollouts.samples), rollouts.count, self.scorer.columns
        values = torch.from_numpy(rollouts.rewards[:, : len(names)]).view(n, m, len(names))
        scored = ~values.isnan()
        weights = {column: config.weight for column, config in self.scorer.configs.items()}
        table = RewardTable(
            values,
            names,
            weights={name: weights[name.partition(".")[0]] for name in names},
            valid=~rollouts.lost if rollouts.facts["lost"].any() else None,
            lengths=torch.from_numpy(rollouts.facts["length"].astype(np.float64)).view(n, m),
            scored=None if scored.all() else scored,
            has_token_rewards=any(rollouts.token_weights.values()),
            turns=None
            if rollouts.turns is None
            else turn_rewards(rollouts, self.scorer.configs, self.config.algorithm.gamma),
        )
        if greedy is not None:
            drawn = torch.from_numpy(greedy.rewards)  # one that was not scored: as if it were its prompt's average
            average = table.filled.sum(1) / table.mask.sum(1, keepdim=True).clamp(min=1)
            table.greedy = torch.where(drawn.isnan(), average, drawn)
        return table
