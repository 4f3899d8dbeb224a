"""All rewards of a recipe, scoring rollouts: pooled and remote ones as soon as a rollout ends, inline ones at the end."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

from megatron_rl.base.messages import errors_named
from megatron_rl.config.schema import RewardConfig
from megatron_rl.data.sample import Sample, SampleMapping, TokenMapping
from megatron_rl.rewards.kinds import InlineReward, PooledReward, Remark, Score
from megatron_rl.rewards.registry import check_rewards, columns_of
from megatron_rl.rewards.remote import RemoteReward
from megatron_rl.rewards.score_checks import (
    RewardError,
    ScoringStats,
    condition_reward,
    named_scores,
    place_of,
    token_scores,
)
from megatron_rl.runtime.calls import CallTimeout

if TYPE_CHECKING:
    import numpy as np

    from megatron_rl.data.rollout import Rollout
    from megatron_rl.data.tokenizer import Tokenizer


@dataclass
class _Scoring:
    """A rollout that is being scored.

    Attributes:
        mapping: its sample, as rewards get it.
        row: the columns known so far, before any `condition`.
        rollout: where rewards per token are computed too.
        futures: running calls by reward.
        tokens: float32 [response tokens] of each reward per token that is known.
    """

    completion: str
    sample: Sample
    mapping: SampleMapping
    rollout: Rollout | None = None
    row: dict[str, float] = field(default_factory=dict)
    futures: dict[str, Future[Score]] = field(default_factory=dict)
    tokens: dict[str, np.ndarray] = field(default_factory=dict)

    def cancel(self) -> None:
        for future in self.futures.values():
            future.cancel()


class Scorer:
    """All rewards of a recipe, ready to score rollouts.

    Args:
        rewards: the recipe's section, by column name.
        needed: columns the estimator asks for; rewards marked `when_needed` are computed only if they are among them.

    Raises:
        ValueError: a mistake in the section, a condition on a column that is not computed, or a needed column per token.
    """

    def __init__(self, rewards: Mapping[str, RewardConfig], needed: Collection[str] = ()) -> None:
        self.configs = {name: config for name, config in rewards.items() if not config.when_needed or name in needed}
        self._rewards = check_rewards(self.configs)
        self._inline = {name: reward for name, reward in self._rewards.items() if isinstance(reward, InlineReward)}
        self._pooled = {name: reward for name, reward in self._rewards.items() if isinstance(reward, PooledReward)}
        self._remote = {name: reward for name, reward in self._rewards.items() if isinstance(reward, RemoteReward)}
        self.token_weights = {
            name: self.configs[name].weight for name, reward in self._rewards.items() if reward.per_token
        }
        if by_token := sorted(self.token_weights.keys() & set(needed)):
            raise ValueError(f"rewards.{by_token[0]} has a number per token; the estimator needs one per rollout there")
        self._columns = {
            name: () if reward.per_token else columns_of(name, reward) for name, reward in self._rewards.items()
        }
        self._reward_of = {column: name for name, columns in self._columns.items() for column in columns}
        self._open: dict[Hashable, _Scoring] = {}
        self._stats = ScoringStats()
        self._timeouts = self._all_timeouts()

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the numbers every rollout gets, in order; without rewards per token (`token_weights`)."""
        return tuple(self._reward_of)

    @property
    def starts_early(self) -> bool:
        """Whether some reward can score a rollout while others are generated (`start`)."""
        return len(self._inline) < len(self._rewards)

    def check(self, samples: Iterable[Sample]) -> None:
        """ValueError where a sample lacks what a reward needs of it, such as a gold answer; names both."""
        for sample in samples:
            for name, reward in self._rewards.items():
                if self._applies(name, sample):
                    with errors_named(f"the reward {name!r} cannot score sample {sample.id}"):
                        reward.check_sample(sample.as_mapping())

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """ValueError where a reward does not understand the policy's tokens; names it."""
        for name, reward in self._rewards.items():
            with errors_named(f"rewards.{name}"):
                reward.check_tokenizer(tokenizer)

    def doubts(self, samples: Sequence[Sample]) -> list[str]:
        """Warnings about samples that may be scored wrongly; names rewards and samples. Takes seconds."""
        found = []
        for name, reward in self._rewards.items():
            own = [(sample.id, sample.as_mapping()) for sample in samples if self._applies(name, sample)]
            found += [f"the reward {name!r}: {text}" for text in reward.doubts(own)]
        self._timeouts = self._all_timeouts()  # not counted in the first step
        return found

    # ------------------------------------------------------------------------------------------------------- scoring
    def start(
        self,
        key: Hashable,
        completion: str,
        sample: Sample,
        finish_reason: str | None = None,
        num_tokens: int | None = None,
        rollout: Rollout | None = None,
    ) -> None:
        """Starts the pooled and remote rewards of a rollout; `score` finds them by the key. Arguments as there."""
        self._open[key] = self._start(completion, sample, finish_reason, num_tokens, rollout)

    def score(
        self,
        completions: Sequence[str],
        samples: Sequence[Sample],
        finish_reasons: Sequence[str] | None = None,
        num_tokens: Sequence[int] | None = None,
        keys: Sequence[Hashable] | None = None,
        rollouts: Sequence[Rollout] | None = None,
    ) -> list[dict[str, float]]:
        """One dict per rollout: column name to value, in the order of `columns`.

        A reward that returns several numbers gives the columns `<name>.<part>`. Columns are 0 for samples outside a reward's
        `tasks` and where its `condition` is not met. NaN: the reward has no value.

        Args:
            completions: text of each rollout's response; the other lists are in the same order.
            finish_reasons: `stop` or `length`; None: all stopped.
            num_tokens: response lengths; needed by rewards on length.
            keys: of rollouts that were started; None: none was.
            rollouts: whose `token_rewards` are filled in; each one's row then has also the means over its tokens. None: no
                rewards per token are computed.

        Raises:
            RewardError: a reward raised or returned no finite number within its bounds; names column and sample.
        """
        count = len(completions)
        given: list[tuple[str, Sequence[object] | None]] = [("samples", samples), ("finish_reasons", finish_reasons)]
        given += [("num_tokens", num_tokens), ("keys", keys), ("rollouts", rollouts)]
        for what, other in given:
            if other is not None and len(other) != count:
                raise ValueError(f"{len(other)} {what} for {count} completions")
        started = [self._open.pop(key, None) for key in keys or ()] or [None] * count
        self._stats.early += sum(future.done() for scoring in started if scoring for future in scoring.futures.values())
        scorings = [
            scoring
            or self._start(
                completions[i],
                samples[i],
                finish_reasons[i] if finish_reasons else None,
                num_tokens[i] if num_tokens else None,
                rollouts[i] if rollouts else None,
            )
            for i, scoring in enumerate(started)
        ]
        try:
            return self._finish(scorings)
        except BaseException:
            for scoring in scorings:
                scoring.cancel()
            raise

    def _start(
        self,
        completion: str,
        sample: Sample,
        finish_reason: str | None,
        num_tokens: int | None,
        rollout: Rollout | None,
    ) -> _Scoring:
        scoring = _Scoring(completion, sample, _mapping(sample, finish_reason, num_tokens), rollout)
        for name in self._rewards:
            if not self._applies(name, sample):
                self._fill(name, scoring, 0.0)
        for name, reward in (self._pooled | self._remote).items():
            if self._lacks(name, scoring) and self._is_gated_out(name, scoring):
                self._fill(name, scoring, 0.0)
            elif self._lacks(name, scoring):
                scoring.futures[name] = reward.submit(completion, self._mapping_for(name, scoring))
        self._stats.started += len(scoring.futures)
        return scoring

    def _lacks(self, name: str, scoring: _Scoring) -> bool:
        """Whether a reward is yet to be computed for a rollout."""
        if name in self.token_weights:
            return scoring.rollout is not None and name not in scoring.tokens
        return not scoring.row.keys() >= set(self._columns[name])

    def _fill(self, name: str, scoring: _Scoring, value: float) -> None:
        """One value in all columns of a reward, and for all tokens."""
        if name in self.token_weights and scoring.rollout is not None:
            import numpy as np

            scoring.tokens[name] = np.full(scoring.rollout.length, value, dtype=np.float32)
        scoring.row |= dict.fromkeys(self._columns[name], value)

    def _take(self, name: str, scoring: _Scoring, score: Score) -> None:
        """Checks and keeps what a reward returned."""
        if name in self.token_weights:
            assert scoring.rollout is not None
            length, sample_id = scoring.rollout.length, scoring.sample.id
            scoring.tokens[name] = token_scores(name, self._rewards[name], score, length, sample_id)
        else:
            scoring.row |= named_scores(name, self._rewards[name], score, scoring.sample.id)

    def _mapping_for(self, name: str, scoring: _Scoring) -> SampleMapping:
        if name not in self.token_weights or scoring.rollout is None:
            return scoring.mapping
        rollout = scoring.rollout
        tokens = TokenMapping(token_ids=rollout.tokens, loss_mask=rollout.loss_mask, logprobs=rollout.logprobs)
        return cast(SampleMapping, {**scoring.mapping, **tokens})

    def remarks(self, completion: str, sample: Sample, finish_reason: str, num_tokens: int) -> dict[str, list[Remark]]:
        """Remarks of rewards on a scored rollout, by the reward's name; without those that say nothing."""
        mapping, found = _mapping(sample, finish_reason, num_tokens), dict[str, list[Remark]]()
        for name, reward in self._rewards.items():
            if self._applies(name, sample):
                with self._naming(name, sample):
                    found[name] = list(reward.remarks(completion, mapping))
        return {name: remarks for name, remarks in found.items() if remarks}

    def _is_gated_out(self, name: str, scoring: _Scoring) -> bool:
        """Whether an inline reward already shows that the condition fails; its value stays in the row.

        A reward that is itself the condition of another is always computed.
        """
        condition = self.configs[name].condition
        own = self._columns[name]
        if condition is None or any(c.condition and c.condition.column in own for c in self.configs.values()):
            return False
        gate = self._reward_of[condition.column]
        if gate not in self._inline or self._inline[gate].batched:
            return False
        if condition.column not in scoring.row:
            self._compute(gate, [scoring])
        return scoring.row[condition.column] < condition.at_least

    def _finish(self, scorings: Sequence[_Scoring]) -> list[dict[str, float]]:
        began = time.monotonic()
        for name in self._inline:
            self._compute(name, [scoring for scoring in scorings if self._lacks(name, scoring)])
        for name, reward in self._remote.items():  # waits for each no longer than its `step_seconds`
            futures = [scoring.futures[name] for scoring in scorings if name in scoring.futures]
            left = began + reward.rules.step_seconds - time.monotonic()
            if futures and wait(futures, max(0.0, left)).not_done:
                reward.expire()
        for scoring in scorings:
            for name, future in scoring.futures.items():
                self._await(name, future, scoring)
        return [self._conditioned(scoring) for scoring in scorings]

    def _compute(self, name: str, scorings: Sequence[_Scoring]) -> None:
        """Fills in the columns of an inline reward."""
        if not scorings:
            return
        reward = self._inline[name]
        with self._naming(name, scorings[0].sample):
            mappings = [self._mapping_for(name, one) for one in scorings]
            scores = reward.scores([one.completion for one in scorings], mappings)
        for one in scorings:
            with self._naming(name, one.sample):
                score = next(scores)
            self._take(name, one, score)

    def _await(self, name: str, future: Future[Score], scoring: _Scoring) -> None:
        """Fills in the columns of a pooled or remote reward; NaN where its call was late."""
        with self._naming(name, scoring.sample):
            try:
                score = future.result()
            except CallTimeout:
                self._pooled[name].late += 1
                self._fill(name, scoring, math.nan)
                return
        self._take(name, scoring, score)

    def _applies(self, name: str, sample: Sample) -> bool:
        tasks = self.configs[name].tasks
        return tasks is None or sample.task in tasks

    def _conditioned(self, scoring: _Scoring) -> dict[str, float]:
        raw = scoring.row
        row = {column: raw[column] for column in self._reward_of}
        for name, config in self.configs.items():
            if config.condition is not None:
                gate = raw[config.condition.column], config.condition.at_least
                for column in self._columns[name]:
                    row[column] = condition_reward(raw[column], *gate)
                factor = condition_reward(1.0, *gate)
                if name in scoring.tokens and factor != 1.0:
                    self._fill(name, scoring, factor)
        return row | self._token_means(scoring)

    def _token_means(self, scoring: _Scoring) -> dict[str, float]:
        """Fills in the rollout's token rewards. Returns each one's mean: NaN without a value, 0 without tokens."""
        if scoring.rollout is None or not self.token_weights:
            return {}
        import numpy as np

        scoring.rollout.token_rewards = np.stack([scoring.tokens[name] for name in self.token_weights], axis=1)
        return {
            name: float(scoring.tokens[name].mean()) if scoring.rollout.length else 0.0 for name in self.token_weights
        }

    @contextlib.contextmanager
    def _naming(self, name: str, sample: Sample) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            text = f"{type(error).__name__}: {error}{place_of(error)}"
            if isinstance(error, KeyError):
                text += f"; the sample's metadata has {', '.join(sample.metadata) or 'no keys'}"
            raise RewardError(f"the reward {name!r} failed on sample {sample.id}: {text}") from error

    # ------------------------------------------------------------------------------------------------ part of a run
    def open(self, run_dir: Path, rank: int, world: int) -> None:
        """Joins a run as one of `world` processes; servers' answers are cached in its folder."""
        for name, reward in self._remote.items():
            reward.open(run_dir / "answers" / name, rank, world)

    def begin_step(self, step: int) -> None:
        """The step that the following counts belong to."""
        for reward in self._remote.values():
            reward.begin_step(step)

    def take_stats(self) -> ScoringStats:
        """Statistics since the last call. No rollout may be half scored."""
        stats, self._stats = self._stats, ScoringStats()
        timeouts = self._all_timeouts()
        stats.timeouts = {name: count - self._timeouts[name] for name, count in timeouts.items()}
        self._timeouts = timeouts
        stats.remote = {name: reward.take_counts() for name, reward in self._remote.items()}
        return stats

    def learn(self, stats: ScoringStats) -> None:
        """Adds the report of a process of the run, this one included: no rank repeats another's question to a server."""
        for name, (counts, answers) in stats.remote.items():
            self._remote[name].learn(counts, answers)

    def _all_timeouts(self) -> dict[str, int]:
        return {name: reward.timeouts for name, reward in self._pooled.items() if reward.timeouts is not None}

    def close(self) -> None:
        """Ends connections and threads; calls that have not begun are dropped."""
        for one in self._open.values():
            one.cancel()
        for reward in self._rewards.values():
            reward.close()


def _mapping(sample: Sample, finish_reason: str | None, num_tokens: int | None) -> SampleMapping:
    mapping = sample.as_mapping()
    if finish_reason is not None:
        mapping["finish_reason"] = finish_reason
    if num_tokens is not None:
        mapping["num_tokens"] = num_tokens
    return mapping
