"""All rewards of a recipe, scoring rollouts: slow rewards from the moment a rollout is there, the others at the end."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.config.schema import RewardConfig
from megatron_rl.names import unknown_name
from megatron_rl.rewards.calls import Call, CallPool
from megatron_rl.rewards.registry import Reward, make_reward, real
from megatron_rl.rewards.remote import Counts, RemoteReward

if TYPE_CHECKING:
    from megatron_rl.data import Sample


_CALL_SECONDS = 60.0  # deadline of a `concurrent` reward that does not say `timeout_seconds`


class RewardError(RuntimeError):
    """A reward raised, or returned something that is no finite number; names the reward and the sample."""


@dataclass
class Report:
    """What one process's rewards did since the last report.

    Attributes:
        timeouts: per reward whose calls have a deadline: calls that ran into it.
        remote: per reward that asks a server: its counts, and answers that other ranks may use.
        slow, early: calls to slow rewards; those of them that had ended when the last rollout was there.
    """

    timeouts: dict[str, int] = field(default_factory=dict)
    remote: dict[str, tuple[Counts, Mapping[str, Any]]] = field(default_factory=dict)
    slow: int = 0
    early: int = 0

    def __iadd__(self, other: Report) -> Report:
        """Sums of both; answers are not kept."""
        for name, timeouts in other.timeouts.items():
            self.timeouts[name] = self.timeouts.get(name, 0) + timeouts
        for name, (counts, _) in other.remote.items():
            total = self.remote[name][0] if name in self.remote else Counts()
            total += counts
            self.remote[name] = (total, {})
        self.slow, self.early = self.slow + other.slow, self.early + other.early
        return self


@dataclass
class _Started:
    """A rollout whose slow rewards are under way."""

    row: dict[str, float]  # columns of rewards that were needed to decide whether to start a slow one
    futures: dict[str, Future[Any]]  # by reward


class Scorer:
    """All rewards of a recipe, ready to score rollouts.

    A reward is slow where it waits for other processes or machines: it asks a server (it has a method `submit`), runs in a
    helper process (`isolated`) or says so (`concurrent`). Slow rewards run in threads and can be started early (`start`).
    A call of a `concurrent` one that takes longer than its `timeout_seconds` is given up: no value, and counted.
    The others run in the caller's thread, which they would only hold up if they ran beside it; a reward with a method
    `score_batch` gets all rollouts at once.

    Args:
        rewards: the recipe's section, by column name.
        needed: columns the estimator asks for; rewards marked `when_needed` are computed only if they are among them.
        workers: rollouts scored at a time by `concurrent` rewards; None: this process's share of the processors.

    Raises:
        ValueError: a bad name or parameter, or a condition on a column that is not computed.
    """

    def __init__(
        self, rewards: Mapping[str, RewardConfig], needed: Collection[str] = (), workers: int | None = None
    ) -> None:
        self.configs = {name: config for name, config in rewards.items() if not config.when_needed or name in needed}
        self._rewards = {name: make_reward(config.reward, **config.params) for name, config in self.configs.items()}
        self._reward_of = {c: name for name, reward in self._rewards.items() for c in columns_of(name, reward)}
        for name, config in self.configs.items():
            if config.condition is not None and config.condition.column not in self._reward_of:
                problem = unknown_name("reward column", config.condition.column, self.columns)
                raise ValueError(f"rewards.{name}.condition.column: {problem}")
        self._remote = {name: r for name, r in self._rewards.items() if isinstance(r, RemoteReward)}
        self._slow = {name for name, reward in self._rewards.items() if _is_slow(reward)}
        self._helpers: dict[str, ThreadPoolExecutor] = {}
        self._calls = CallPool(workers or _processor_share())
        self._late = {n: 0 for n, r in self._rewards.items() if _is_threaded(r) and _call_seconds(r) is not None}
        self._started: dict[Hashable, _Started] = {}
        self._report = Report()
        self._timeouts = self._all_timeouts()

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the numbers every rollout gets, in order."""
        return tuple(self._reward_of)

    @property
    def has_slow(self) -> bool:
        """Whether it is worth while to `start` rollouts early."""
        return bool(self._slow)

    def check(self, samples: Iterable[Sample]) -> None:
        """ValueError where a sample lacks what a reward needs of it, such as a gold answer; names both."""
        looks = {name: r.check_sample for name, r in self._rewards.items() if hasattr(r, "check_sample")}
        for sample in samples:
            for name, look in looks.items():
                if self._applies(name, sample):
                    try:
                        look(sample.as_mapping())
                    except ValueError as error:
                        raise ValueError(f"the reward {name!r} cannot score sample {sample.id}: {error}") from error

    def doubts(self, samples: Sequence[Sample]) -> list[str]:
        """Warnings about samples that can be scored, but perhaps not rightly; names rewards and samples. Takes seconds."""
        found = []
        for name, reward in self._rewards.items():
            if hasattr(reward, "doubts"):
                own = [(sample.id, sample.as_mapping()) for sample in samples if self._applies(name, sample)]
                found += [f"the reward {name!r}: {text}" for text in reward.doubts(own)]
        self._timeouts = self._all_timeouts()  # those of the first step are counted from here
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
        """Starts the slow rewards of a rollout that is yet to be scored; `score` finds them by the key."""
        self._started[key] = self._start(completion, sample, _mapping(sample, finish_reason, num_tokens))

    def score(
        self,
        completions: Sequence[str],
        samples: Sequence[Sample],
        finish_reasons: Sequence[str] | None = None,
        num_tokens: Sequence[int] | None = None,
        keys: Sequence[Hashable] | None = None,
    ) -> list[dict[str, float]]:
        """One dict per rollout: column name to value, in the order of `columns`.

        A reward that returns several numbers gives the columns `<name>.<part>`. Where `tasks` keeps a reward from a
        sample, its columns are 0; so they are where its `condition` is not met. NaN: the reward has no value.

        Args:
            completions: text of each rollout's response.
            samples: the sample each rollout answers.
            finish_reasons: `stop` or `length` of each rollout; None: all stopped.
            num_tokens: response length of each rollout; needed by rewards on length.
            keys: under which rollouts may have been started; None: none was.

        Raises:
            RewardError: a reward raised or returned no finite number; names column and sample.
        """
        count = len(completions)
        given = (("samples", samples), ("finish_reasons", finish_reasons), ("num_tokens", num_tokens), ("keys", keys))
        for what, other in given:
            if other is not None and len(other) != count:
                raise ValueError(f"{len(other)} {what} for {count} completions")
        mappings = [
            _mapping(sample, finish_reasons[i] if finish_reasons else None, num_tokens[i] if num_tokens else None)
            for i, sample in enumerate(samples)
        ]
        waiting = [self._started.pop(key, None) for key in keys or ()] or [None] * count
        self._report.early += sum(future.done() for one in waiting if one for future in one.futures.values())
        started = [
            one if one is not None else self._start(completions[i], samples[i], mappings[i])
            for i, one in enumerate(waiting)
        ]
        try:
            return self._finish(completions, samples, mappings, started)
        except BaseException:
            for one in started:
                for future in one.futures.values():
                    future.cancel()
            raise

    def _start(self, completion: str, sample: Sample, mapping: Mapping[str, Any]) -> _Started:
        started = _Started({}, {})
        in_turn: dict[str, Call] = {}
        for name in self._rewards:
            if name not in self._slow or not self._applies(name, sample):
                continue
            if self._is_gated_out(name, completion, sample, mapping, started.row):
                started.row |= dict.fromkeys(columns_of(name, self._rewards[name]), 0.0)
                continue
            reward = self._rewards[name]
            if isinstance(reward, RemoteReward):
                started.futures[name] = reward.submit(completion, mapping)
            elif hasattr(reward, "isolated"):  # its calls take turns, so a thread of its own is enough
                started.futures[name] = self._helper(name).submit(reward, completion, mapping)
            else:
                in_turn[name] = Call(functools.partial(reward, completion, mapping), _call_seconds(reward))
        if in_turn:  # one after the other: rewards on one program share its run
            started.futures |= dict.fromkeys(in_turn, self._calls.submit(in_turn))
        self._report.slow += len(started.futures)
        return started

    def _is_gated_out(
        self, name: str, completion: str, sample: Sample, mapping: Mapping[str, Any], row: dict[str, float]
    ) -> bool:
        """Whether a slow reward counts for nothing here, as far as rewards that are at hand can tell.

        Its gate's value is left in the row. A reward that is itself the gate of another is always needed.
        """
        condition = self.configs[name].condition
        own = columns_of(name, self._rewards[name])
        if condition is None or any(c.condition and c.condition.column in own for c in self.configs.values()):
            return False
        gate = self._reward_of[condition.column]
        if gate in self._slow or hasattr(self._rewards[gate], "score_batch"):
            return False
        if condition.column not in row:
            row |= self._call(gate, completion, sample, mapping)
        return row[condition.column] < condition.at_least

    def _finish(
        self,
        completions: Sequence[str],
        samples: Sequence[Sample],
        mappings: Sequence[Mapping[str, Any]],
        started: Sequence[_Started],
    ) -> list[dict[str, float]]:
        began = time.monotonic()
        rows = [dict(one.row) for one in started]
        for name, reward in self._rewards.items():
            todo = [i for i, row in enumerate(rows) if name not in started[i].futures and self._lacks(row, name)]
            if hasattr(reward, "score_batch"):
                batch = [i for i in todo if self._applies(name, samples[i])]
                for i, scores in zip(batch, self._call_batch(name, batch, completions, samples, mappings), strict=True):
                    rows[i] |= scores
                todo = [i for i in todo if self._lacks(rows[i], name)]
            for i in todo:
                rows[i] |= self._call(name, completions[i], samples[i], mappings[i])
        self._wait_for_servers(started, began)
        for i, one in enumerate(started):
            for name, future in one.futures.items():
                rows[i] |= self._result(name, future, samples[i])
        return [self._conditioned(row) for row in rows]

    def _lacks(self, row: Mapping[str, float], name: str) -> bool:
        return any(column not in row for column in columns_of(name, self._rewards[name]))

    def _applies(self, name: str, sample: Sample) -> bool:
        tasks = self.configs[name].tasks
        return tasks is None or sample.task in tasks

    def _call(self, name: str, completion: str, sample: Sample, mapping: Mapping[str, Any]) -> dict[str, float]:
        """A reward's columns, computed here and now; 0 where it does not apply."""
        reward = self._rewards[name]
        if not self._applies(name, sample):
            return dict.fromkeys(columns_of(name, reward), 0.0)
        with self._naming(name, sample):
            score = reward(completion, mapping)
        return named_scores(name, reward, score, sample.id)

    def _result(self, name: str, future: Future[Any], sample: Sample) -> dict[str, float]:
        """A slow reward's columns; NaN where its call was late."""
        reward = self._rewards[name]
        with self._naming(name, sample):
            answer = future.result()
            if _is_threaded(reward):
                outcome = answer[name]
                if outcome.error is not None:
                    raise outcome.error
                if outcome.late:
                    self._late[name] += 1
                    return dict.fromkeys(columns_of(name, reward), math.nan)
                answer = outcome.value
        return named_scores(name, reward, answer, sample.id)

    def _call_batch(
        self,
        name: str,
        batch: Sequence[int],
        completions: Sequence[str],
        samples: Sequence[Sample],
        mappings: Sequence[Mapping[str, Any]],
    ) -> list[dict[str, float]]:
        if not batch:
            return []
        reward: Any = self._rewards[name]
        with self._naming(name, samples[batch[0]]):
            scores = reward.score_batch([completions[i] for i in batch], [mappings[i] for i in batch])
        return [named_scores(name, reward, score, samples[i].id) for i, score in zip(batch, scores, strict=True)]

    def _wait_for_servers(self, started: Sequence[_Started], began: float) -> None:
        """Waits for every reward that asks a server, each no longer than its `step_seconds`."""
        for name, reward in self._remote.items():
            futures = [one.futures[name] for one in started if name in one.futures]
            left = began + reward.policy.step_seconds - time.monotonic()
            if futures and wait(futures, max(0.0, left)).not_done:
                reward.expire()

    def _conditioned(self, raw: dict[str, float]) -> dict[str, float]:
        row = {column: raw[column] for column in self._reward_of}
        for name, config in self.configs.items():
            if config.condition is not None:
                for column in columns_of(name, self._rewards[name]):
                    row[column] = condition_reward(raw[column], raw[config.condition.column], config.condition.at_least)
        return row

    @contextlib.contextmanager
    def _naming(self, name: str, sample: Sample) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise RewardError(f"the reward {name!r} failed on sample {sample.id}: {text}") from error

    def _helper(self, name: str) -> ThreadPoolExecutor:
        if name not in self._helpers:
            self._helpers[name] = ThreadPoolExecutor(1, thread_name_prefix=f"reward {name}")
        return self._helpers[name]

    # ------------------------------------------------------------------------------------------------ part of a run
    def open(self, run_dir: Path, rank: int, world: int) -> None:
        """One of `world` processes that share the work of a run; answers of servers are kept in its folder."""
        for name, reward in self._remote.items():
            reward.open(run_dir / "answers" / name, rank, world)

    def begin_step(self) -> None:
        """A new step's budgets."""
        for reward in self._remote.values():
            reward.begin_step()

    def take_report(self) -> Report:
        """What happened since the last one. No rollout may be half scored."""
        report, self._report = self._report, Report()
        timeouts = self._all_timeouts()
        report.timeouts = {name: count - self._timeouts[name] for name, count in timeouts.items()}
        self._timeouts = timeouts
        report.remote = {name: reward.take_counts() for name, reward in self._remote.items()}
        return report

    def learn(self, report: Report) -> None:
        """What a process of the run, this one too, has reported: nobody asks a server what another has asked."""
        for name, (counts, answers) in report.remote.items():
            self._remote[name].learn(counts, answers)

    def _all_timeouts(self) -> dict[str, int]:
        isolated = {n: reward.isolated.timeouts for n, reward in self._rewards.items() if hasattr(reward, "isolated")}
        return isolated | self._late

    def close(self) -> None:
        """Ends connections and threads; what has not begun is dropped."""
        for helper in self._helpers.values():
            helper.shutdown(wait=False, cancel_futures=True)
        for one in self._started.values():
            for future in one.futures.values():
                future.cancel()
        for reward in self._remote.values():
            reward.close()


def _is_threaded(reward: Reward) -> bool:
    has_own = isinstance(reward, RemoteReward) or hasattr(reward, "isolated")
    return not has_own and getattr(reward, "concurrent", False)


def _is_slow(reward: Reward) -> bool:
    return isinstance(reward, RemoteReward) or hasattr(reward, "isolated") or _is_threaded(reward)


def _call_seconds(reward: Reward) -> float | None:
    """The deadline of a `concurrent` reward's call; None: it has limits of its own. ValueError where it is no such number."""
    seconds = getattr(reward, "timeout_seconds", _CALL_SECONDS)
    return None if seconds is None else real("its attribute timeout_seconds", seconds, low=0.01)


def _processor_share() -> int:
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _mapping(sample: Sample, finish_reason: str | None, num_tokens: int | None) -> dict[str, Any]:
    mapping = sample.as_mapping()
    if finish_reason is not None:
        mapping["finish_reason"] = finish_reason
    if num_tokens is not None:
        mapping["num_tokens"] = num_tokens
    return mapping


def condition_reward(value: float, gate: float, threshold: float) -> float:
    """`value` where the gate reaches the threshold, else 0 (GDPO, Eq. 8). Both are raw rewards, before any weight.

    NaN where the gate is: nobody can say.
    """
    if math.isnan(gate):
        return math.nan
    return value if gate >= threshold else 0.0


def columns_of(name: str, reward: Reward) -> tuple[str, ...]:
    """Column names of a reward: its own, or one per part it declares in an attribute `columns`."""
    parts = getattr(reward, "columns", None)
    return (name,) if parts is None else tuple(f"{name}.{part}" for part in parts)


def named_scores(name: str, reward: Reward, score: Any, sample_id: str) -> dict[str, float]:
    """What a reward returned, by column; NaN where it may abstain and has. RewardError where it is not what it declares."""
    if score is None and getattr(reward, "may_abstain", False):
        return dict.fromkeys(columns_of(name, reward), math.nan)
    parts = getattr(reward, "columns", None)
    if isinstance(score, Mapping) != (parts is not None) or (parts is not None and set(score) != set(parts)):
        declared = "one number" if parts is None else f"the parts {list(parts)} in its attribute `columns`"
        returned = list(score) if isinstance(score, Mapping) else repr(score)
        raise RewardError(f"the reward {name!r} returns {returned} on sample {sample_id}, but it declares {declared}")
    named = {name: score} if parts is None else {f"{name}.{part}": score[part] for part in parts}
    for column, value in named.items():
        if not isinstance(value, Real) or not math.isfinite(value):
            raise RewardError(f"the reward {column!r} is {value!r} on sample {sample_id}, not a finite number")
    return {column: float(value) for column, value in named.items()}
