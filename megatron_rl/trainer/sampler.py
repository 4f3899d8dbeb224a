"""Sampling: prompts in their order, the engine that draws responses to them, and the scorer of these."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_rl.actor.actor import Actor
from megatron_rl.algorithms.shaping import signal_groups
from megatron_rl.config.schema import Config
from megatron_rl.data import RewardTable, Rollout, Sample
from megatron_rl.rewards import Scorer, ScoringStats
from megatron_rl.rollout.engine import Engine
from megatron_rl.rollout.generate import generate
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.rollout.sync import SyncDifference, WeightSync
from megatron_rl.runtime.distributed import Grid
from megatron_rl.runtime.heartbeat import HEARTBEAT
from megatron_rl.runtime.step_timer import StepTimer
from megatron_rl.tasks import Order, Prompts, make_order
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.trainer.report import Reporter


@dataclass(frozen=True)
class Drawn:
    """A step's prompts with their scored rollouts."""

    samples: list[Sample]
    rollouts: list[Rollout]  # by sample, then index
    position: int  # training prompts taken until then


class Sampler:
    """This rank's share of sampling and scoring. `folder`: Hugging Face folder with config and tokenizer."""

    def __init__(
        self,
        config: Config,
        grid: Grid,
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
        self._scored = ScoringStats()  # what slow rewards did in it
        self._engine: Engine | None = None  # until `start_engine`
        self._sync: WeightSync | None = None

    # ------------------------------------------------------------------------------------------------------ the engine
    def start_engine(self, actor: Actor) -> None:
        """Starts the colocated engine, asleep and without weights."""
        self._engine = Engine(self.config, self.grid, self.folder)
        self._sync = WeightSync(self.config, self.grid, actor, self._engine)
        self._engine.sleep()

    @property
    def has_engine(self) -> bool:
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "start_engine has not been called"
        return self._engine

    @property
    def sync(self) -> WeightSync:
        assert self._sync is not None, "start_engine has not been called"
        return self._sync

    def wake(self) -> None:
        """The engine takes the device, and the actor's weights.

        On a GPU its weights are mapped first, filled from the actor, and only then does its KV cache come back: the two
        copies of the weights overlap, the cache and the actor's gradients never do. On a CPU nothing moves.
        """
        self.engine.wake_weights()
        self.sync.push()
        self.engine.wake_cache()

    def check_sync(self, rollouts: Sequence[Rollout] | None = None) -> SyncDifference:
        """Differences of log-probs from the actor's over a few rollouts; None: over the recipe's first prompts.

        Raises:
            SyncError: they are above `rollout.sync_tolerance`.
        """
        count = self.config.rollout.sync_check_rollouts
        if rollouts is None:
            samples = self.prompts.train or [s for samples in self.prompts.eval.values() for s in samples]
            return self.sync.check([sample.prompt_ids for sample in samples[:count]])
        spaced = rollouts[:: max(1, len(rollouts) // count)]
        return self.sync.check([rollout.tokens.tolist() for rollout in spaced[:count]])

    def close(self) -> None:
        self.scorer.close()
        if self._engine is not None:
            self._engine.shutdown()

    # -------------------------------------------------------------------------------------------------------- sampling
    def sample(self, step: int, position: int) -> Drawn:
        """The next prompts after `position`, each with a group of scored rollouts.

        With dynamic sampling (`algorithm.resample_rounds`) groups without signal are replaced by further prompts until
        `trainer.prompts_per_step` groups have one or the rounds are used up; groups in excess are left out.
        """
        config = self.config
        self.scorer.begin_step(step)
        wanted, group_size = config.trainer.prompts_per_step, config.rollout.group_size
        sampling = Sampling(config.rollout.temperature, 1.0, config.rollout.max_tokens)
        kept = Drawn([], [], position)
        rounds = config.algorithm.resample_rounds if config.algorithm.drop_no_signal_groups else 0
        for round_ in range(rounds + 1):
            assert self.order is not None  # an evaluation takes no training prompts
            samples = _distinct([self.prompts.train[i] for i in self.order.take(position, wanted)], kept.samples)
            position += wanted
            rollouts = self._scored_rollouts(samples, group_size, sampling, step)
            self._counters["rollouts/sampled"] = self._counters.get("rollouts/sampled", 0) + len(rollouts)
            if not rounds:
                return Drawn(samples, rollouts, position)
            signal = signal_groups(self.reward_table(samples, rollouts), config.algorithm.signal_rewards).tolist()
            for i, sample in enumerate(samples):
                if signal[i] and len(kept.samples) < wanted:
                    kept.samples.append(sample)
                    kept.rollouts.extend(rollouts[i * group_size : (i + 1) * group_size])
            self._counters["rollouts/rounds"] = round_ + 1
            if len(kept.samples) == wanted:
                break
        if not kept.samples:  # nothing to learn from in any round: the step reports it and leaves the weights alone
            return Drawn(samples, rollouts, position)
        return Drawn(kept.samples, kept.rollouts, position)

    def sample_greedily(self, samples: Sequence[Sample], step: int) -> list[Rollout]:
        """One scored greedy rollout per sample (ReMax's baseline)."""
        return self._scored_rollouts(samples, 1, Sampling(0.0, 1.0, self.config.rollout.max_tokens), step)

    def _scored_rollouts(self, samples: Sequence[Sample], count: int, sampling: Sampling, step: int) -> list[Rollout]:
        with self.timer("generate"):
            rollouts = self.generate(samples, count, sampling, step)
        with self.timer("reward"):
            self.score(samples, rollouts)
        return rollouts

    def generate(
        self,
        samples: Sequence[Sample],
        count: int,
        sampling: Sampling,
        step: int,
        already_drawn: Mapping[tuple[str, int], Rollout] | None = None,
        on_drawn: Callable[[Rollout], None] | None = None,
    ) -> list[Rollout]:
        """`count` rollouts per sample, decoded; ordered by sample, then index; the same on every rank.

        The recipe's slow rewards start with each rollout that ends, while others are still being generated.

        Args:
            already_drawn: rollouts that are not drawn again, by sample id and index; the same on every rank.
            on_drawn: called with each newly drawn rollout of this rank's engine.
        """
        HEARTBEAT.samples = [sample.id for sample in samples]
        callbacks = [one for one in (self._scoring_starter(samples), on_drawn) if one is not None]

        def on_finished(rollout: Rollout) -> None:
            for callback in callbacks:
                callback(rollout)

        there = already_drawn or {}
        drawn = generate(self.engine, samples, count, sampling, step, on_finished if callbacks else None, there)
        by_key = {**there, **{(rollout.sample_id, rollout.index): rollout for rollout in drawn}}
        rollouts = [by_key[sample.id, index] for sample in samples for index in range(count)]
        texts = self.tokenizer.batch_decode(
            [rollout.response_ids for rollout in rollouts], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        for rollout, text in zip(rollouts, texts, strict=True):
            rollout.text = text
        return rollouts

    # --------------------------------------------------------------------------------------------------------- scoring
    def _scoring_starter(self, samples: Sequence[Sample]) -> Callable[[Rollout], None] | None:
        """Starts the slow rewards of a rollout that has ended; None where no reward is slow."""
        if not self.scorer.starts_early:
            return None
        by_id, place = {sample.id: sample for sample in samples}, {sample.id: i for i, sample in enumerate(samples)}

        def start(rollout: Rollout) -> None:
            rollout.text = self.tokenizer.decode(
                rollout.response_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            if self._scoring_rank(place[rollout.sample_id], rollout) == self.grid.rank:
                key, sample = (rollout.sample_id, rollout.index), by_id[rollout.sample_id]
                self.scorer.start(key, rollout.text, sample, rollout.finish_reason, len(rollout.response_ids))

        return start

    def _scoring_rank(self, place: int, rollout: Rollout) -> int:
        """The rank that scores a rollout: one of the engine that draws it. Equal responses to a prompt go to the same one.
        `place`: of the rollout's sample among those that were generated for.
        """
        size = self.config.rollout.tensor_parallel
        engine = place % (self.grid.world // size)
        return engine * size + zlib.crc32(f"{rollout.sample_id}/{rollout.text}".encode(errors="replace")) % size

    def score(self, samples: Sequence[Sample], rollouts: Sequence[Rollout]) -> None:
        """Fills in `rollout.rewards` of what `generate` returned for these samples: divided over all ranks, known to all."""
        by_id, place = {sample.id: sample for sample in samples}, {sample.id: i for i, sample in enumerate(samples)}
        ranks = [self._scoring_rank(place[rollout.sample_id], rollout) for rollout in rollouts]
        own = [rollout for rollout, rank in zip(rollouts, ranks, strict=True) if rank == self.grid.rank]
        HEARTBEAT.samples = [rollout.sample_id for rollout in own]
        rows = self.scorer.score(
            [rollout.text for rollout in own],
            [by_id[rollout.sample_id] for rollout in own],
            [rollout.finish_reason for rollout in own],
            [len(rollout.response_ids) for rollout in own],
            [(rollout.sample_id, rollout.index) for rollout in own],
        )
        gathered = self.grid.all_gather((rows, self.scorer.take_stats()))
        parts = [iter(part) for part, _ in gathered]
        for rollout, rank in zip(rollouts, ranks, strict=True):
            rollout.rewards = next(parts[rank])
        for _, report in gathered:
            self.scorer.learn(report)
            self._scored += report
        self._counters |= self._scored.metrics()
        self._report.missing_scores(self._scored)

    def take_counters(self) -> dict[str, float]:
        """Metrics of sampling and scoring since the last call."""
        counters, self._counters, self._scored = self._counters, {}, ScoringStats()
        return counters

    def reward_table(
        self, samples: Sequence[Sample], rollouts: Sequence[Rollout], greedy: Sequence[Rollout] | None = None
    ) -> RewardTable:
        """A step's rewards, [prompts, group size, columns]; float64. `greedy`: one scored greedy rollout per sample."""
        n, m = len(samples), self.config.rollout.group_size
        names = tuple(rollouts[0].rewards)
        values = _values(rollouts, names).view(n, m, -1)
        scored = ~values.isnan()
        lengths = torch.tensor([len(rollout.response_ids) for rollout in rollouts], dtype=torch.float64)
        weights = {column: config.weight for column, config in self.scorer.configs.items()}
        table = RewardTable(
            values,
            names,
            weights={name: weights[name.partition(".")[0]] for name in names},
            lengths=lengths.view(n, m),
            scored=None if scored.all() else scored,
        )
        if greedy is not None:
            drawn = _values(greedy, names)  # a greedy rollout that was not scored: as if it were its prompt's average
            table.greedy = torch.where(drawn.isnan(), table.filled.mean(1), drawn)
        return table


def _distinct(samples: Sequence[Sample], taken: Sequence[Sample]) -> list[Sample]:
    """A prompt comes once per step, also where the step is longer than the epoch: groups are formed by prompt id."""
    seen = {sample.id for sample in taken}
    return [sample for sample in samples if not (sample.id in seen or seen.add(sample.id))]  # type: ignore[func-returns-value]


def _values(rollouts: Sequence[Rollout], names: Sequence[str]) -> torch.Tensor:
    return torch.tensor([[rollout.rewards[name] for name in names] for rollout in rollouts], dtype=torch.float64)
