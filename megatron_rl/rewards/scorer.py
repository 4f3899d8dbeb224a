"""All rewards of a recipe, scoring rollouts: pooled and remote ones as soon as a rollout ends, inline ones at the end."""

from __future__ import annotations

import contextlib
import math
import os
import time
import traceback
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import RewardConfig
from megatron_rl.data.sample import Sample, SampleMapping
from megatron_rl.rewards.kinds import InlineReward, PooledReward, Remark, Reward, Score
from megatron_rl.rewards.registry import check_rewards, columns_of
from megatron_rl.rewards.remote import Counts, RemoteReward, Verdict
from megatron_rl.runtime.calls import CallTimeout

_PACKAGE = Path(__file__).parents[1]
_STANDARD_LIBRARY = Path(os.__file__).parent
_ROUNDING = 1e-9  # a sum of shares may end that far outside the bounds of a reward


class RewardError(RuntimeError):
    """A reward raised, or returned no finite number within its bounds; names the reward and the sample."""


@dataclass
class ScoringStats:
    """What one process's rewards did since the last report.

    Attributes:
        timeouts: per pooled reward with a deadline: calls past it.
        remote: per remote reward: its counts, and answers for the other ranks.
        started, early: calls of pooled and remote rewards; those that had finished when the last rollout ended.
    """

    timeouts: dict[str, int] = field(default_factory=dict)
    remote: dict[str, tuple[Counts, Mapping[str, Verdict]]] = field(default_factory=dict)
    started: int = 0
    early: int = 0

    def __iadd__(self, other: ScoringStats) -> ScoringStats:
        """Sums of both; answers are not kept."""
        for name, timeouts in other.timeouts.items():
            self.timeouts[name] = self.timeouts.get(name, 0) + timeouts
        for name, (counts, _) in other.remote.items():
            total = self.remote[name][0] if name in self.remote else Counts()
            total += counts
            self.remote[name] = (total, {})
        self.started, self.early = self.started + other.started, self.early + other.early
        return self

    def metrics(self) -> dict[str, float]:
        """Timeouts, overlap with generation, and the counts of remote rewards."""
        metrics = {f"reward_timeouts/{column}": float(count) for column, count in self.timeouts.items()}
        if self.started:
            metrics["reward_overlap/share"] = self.early / self.started
        for column, (counts, _) in self.remote.items():
            metrics |= counts.metrics(column)
        return metrics


@dataclass
class _Scoring:
    """A rollout that is being scored.

    Attributes:
        mapping: its sample, as rewards get it.
        row: the columns known so far, before any `condition`.
        futures: running calls by reward.
    """

    completion: str
    sample: Sample
    mapping: SampleMapping
    row: dict[str, float] = field(default_factory=dict)
    futures: dict[str, Future[Score]] = field(default_factory=dict)

    def cancel(self) -> None:
        for future in self.futures.values():
            future.cancel()


class Scorer:
    """All rewards of a recipe, ready to score rollouts.

    Args:
        rewards: the recipe's section, by column name.
        needed: columns the estimator asks for; rewards marked `when_needed` are computed only if they are among them.

    Raises:
        ValueError: a mistake in the section, or a condition on a column that is not computed.
    """

    def __init__(self, rewards: Mapping[str, RewardConfig], needed: Collection[str] = ()) -> None:
        self.configs = {name: config for name, config in rewards.items() if not config.when_needed or name in needed}
        self._rewards = check_rewards(self.configs)
        self._inline = {name: reward for name, reward in self._rewards.items() if isinstance(reward, InlineReward)}
        self._pooled = {name: reward for name, reward in self._rewards.items() if isinstance(reward, PooledReward)}
        self._remote = {name: reward for name, reward in self._rewards.items() if isinstance(reward, RemoteReward)}
        self._columns = {name: columns_of(name, reward) for name, reward in self._rewards.items()}
        self._reward_of = {column: name for name, columns in self._columns.items() for column in columns}
        self._open: dict[Hashable, _Scoring] = {}
        self._stats = ScoringStats()
        self._timeouts = self._all_timeouts()

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the numbers every rollout gets, in order."""
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
                    try:
                        reward.check_sample(sample.as_mapping())
                    except ValueError as error:
                        raise ValueError(f"the reward {name!r} cannot score sample {sample.id}: {error}") from error

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
    ) -> None:
        """Starts the pooled and remote rewards of a rollout; `score` finds them by the key."""
        self._open[key] = self._start(completion, sample, finish_reason, num_tokens)

    def score(
        self,
        completions: Sequence[str],
        samples: Sequence[Sample],
        finish_reasons: Sequence[str] | None = None,
        num_tokens: Sequence[int] | None = None,
        keys: Sequence[Hashable] | None = None,
    ) -> list[dict[str, float]]:
        """One dict per rollout: column name to value, in the order of `columns`.

        A reward that returns several numbers gives the columns `<name>.<part>`. Columns are 0 for samples outside a reward's
        `tasks` and where its `condition` is not met. NaN: the reward has no value.

        Args:
            completions: text of each rollout's response; the other lists are in the same order.
            finish_reasons: `stop` or `length`; None: all stopped.
            num_tokens: response lengths; needed by rewards on length.
            keys: of rollouts that were started; None: none was.

        Raises:
            RewardError: a reward raised or returned no finite number within its bounds; names column and sample.
        """
        count = len(completions)
        given = (("samples", samples), ("finish_reasons", finish_reasons), ("num_tokens", num_tokens), ("keys", keys))
        for what, other in given:
            if other is not None and len(other) != count:
                raise ValueError(f"{len(other)} {what} for {count} completions")
        rollouts = [self._open.pop(key, None) for key in keys or ()] or [None] * count
        self._stats.early += sum(
            future.done() for scoring in rollouts if scoring for future in scoring.futures.values()
        )
        scorings = [
            scoring
            or self._start(
                completions[i],
                samples[i],
                finish_reasons[i] if finish_reasons else None,
                num_tokens[i] if num_tokens else None,
            )
            for i, scoring in enumerate(rollouts)
        ]
        try:
            return self._finish(scorings)
        except BaseException:
            for scoring in scorings:
                scoring.cancel()
            raise

    def _start(self, completion: str, sample: Sample, finish_reason: str | None, num_tokens: int | None) -> _Scoring:
        mapping = _mapping(sample, finish_reason, num_tokens)
        scoring = _Scoring(completion, sample, mapping)
        for name in self._rewards:
            if not self._applies(name, sample):
                scoring.row |= dict.fromkeys(self._columns[name], 0.0)
        for name, reward in (self._pooled | self._remote).items():
            if not self._applies(name, sample):
                continue
            if self._is_gated_out(name, scoring):
                scoring.row |= dict.fromkeys(self._columns[name], 0.0)
            else:
                scoring.futures[name] = reward.submit(completion, mapping)
        self._stats.started += len(scoring.futures)
        return scoring

    def remarks(self, completion: str, sample: Sample, finish_reason: str, num_tokens: int) -> dict[str, list[Remark]]:
        """What rewards say of a scored rollout besides its score, by the reward's name; without those that say nothing."""
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
            self._compute(name, [scoring for scoring in scorings if not scoring.row.keys() >= set(self._columns[name])])
        for name, reward in self._remote.items():  # waits for each no longer than its `step_seconds`
            futures = [scoring.futures[name] for scoring in scorings if name in scoring.futures]
            left = began + reward.rules.step_seconds - time.monotonic()
            if futures and wait(futures, max(0.0, left)).not_done:
                reward.expire()
        for scoring in scorings:
            for name, future in scoring.futures.items():
                scoring.row |= self._result(name, future, scoring.sample)
        return [self._conditioned(scoring.row) for scoring in scorings]

    def _compute(self, name: str, scorings: Sequence[_Scoring]) -> None:
        """Fills in the columns of an inline reward."""
        if not scorings:
            return
        reward = self._inline[name]
        with self._naming(name, scorings[0].sample):
            scores = reward.scores([one.completion for one in scorings], [one.mapping for one in scorings])
        for one in scorings:
            with self._naming(name, one.sample):
                score = next(scores)
            one.row |= named_scores(name, reward, score, one.sample.id)

    def _result(self, name: str, future: Future[Score], sample: Sample) -> dict[str, float]:
        """The columns of a pooled or remote reward; NaN where its call was late."""
        with self._naming(name, sample):
            try:
                score = future.result()
            except CallTimeout:
                self._pooled[name].late += 1
                return dict.fromkeys(self._columns[name], math.nan)
        return named_scores(name, self._rewards[name], score, sample.id)

    def _applies(self, name: str, sample: Sample) -> bool:
        tasks = self.configs[name].tasks
        return tasks is None or sample.task in tasks

    def _conditioned(self, raw: Mapping[str, float]) -> dict[str, float]:
        row = {column: raw[column] for column in self._reward_of}
        for name, config in self.configs.items():
            if config.condition is not None:
                for column in self._columns[name]:
                    row[column] = condition_reward(raw[column], raw[config.condition.column], config.condition.at_least)
        return row

    @contextlib.contextmanager
    def _naming(self, name: str, sample: Sample) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            text = f"{type(error).__name__}: {error}{_place(error)}"
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


def condition_reward(value: float, gate: float, threshold: float) -> float:
    """`value` where the gate reaches the threshold, else 0 (GDPO, Eq. 8). Both are raw rewards, before any weight.

    NaN where the gate has no value.
    """
    if math.isnan(gate):
        return math.nan
    return value if gate >= threshold else 0.0


def named_scores(name: str, reward: Reward, score: Score, sample_id: str) -> dict[str, float]:
    """A reward's result by column; NaN where it abstains. RewardError where it does not return what it declares.

    Every value of every kind of reward comes through here, whoever computed it: this is where it is compared with the
    reward's bounds.
    """
    if score is None and reward.may_abstain:
        return dict.fromkeys(columns_of(name, reward), math.nan)
    parts = reward.columns
    named: dict[str, Any] = {name: score}
    if isinstance(score, Mapping):
        named = {f"{name}.{part}": value for part, value in score.items()}
    if isinstance(score, Mapping) != (parts is not None) or set(named) != set(columns_of(name, reward)):
        declared = "one number" if parts is None else f"the parts {list(parts)} in its attribute `columns`"
        returned = list(score) if isinstance(score, Mapping) else repr(score)
        raise RewardError(f"the reward {name!r} returns {returned} on sample {sample_id}, but it declares {declared}")
    for column, value in named.items():
        if not isinstance(value, Real) or not math.isfinite(value):
            raise RewardError(f"the reward {column!r} is {value!r} on sample {sample_id}, not a finite number")
        low, high = reward.bounds
        if not low - _ROUNDING <= float(value) <= high + _ROUNDING:
            raise RewardError(
                f"the reward {column!r} is {value!r} on sample {sample_id}, outside its bounds [{low:g}, {high:g}]"
            )
    return {column: float(value) for column, value in named.items()}


def _place(error: Exception) -> str:
    """File and line of a user's own code where it raised; nothing where that is this package's, or a library's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _is_users(file: str) -> bool:
    path = Path(file)
    libraries = path.is_relative_to(_STANDARD_LIBRARY) or "site-packages" in path.parts
    return path.is_file() and not libraries and not path.is_relative_to(_PACKAGE)
