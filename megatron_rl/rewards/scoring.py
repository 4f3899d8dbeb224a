"""From a recipe's `rewards` section to named numbers per rollout."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from numbers import Real
from typing import TYPE_CHECKING, Any

from megatron_rl.config.schema import RewardConfig
from megatron_rl.names import unknown_name
from megatron_rl.rewards.registry import Reward, make_reward

if TYPE_CHECKING:
    from megatron_rl.data import Sample


class RewardError(RuntimeError):
    """A reward raised, or returned something that is no finite number; names the reward and the sample."""


def check_rewards(rewards: Mapping[str, RewardConfig], tasks: Collection[str] | None = None) -> None:
    """Check names and parameters of all rewards by making them; no process is started and nothing heavy imported.

    Args:
        rewards: the recipe's section, by column name.
        tasks: the recipe's task names, to check `tasks` restrictions against; None: not checked.

    Raises:
        ValueError: naming the key and the nearest known name.
    """
    columns: dict[str, str] = {}  # of every reward, and which reward has it
    for name, config in rewards.items():
        try:
            reward = make_reward(config.reward, **config.params)
        except ValueError as error:
            raise ValueError(f"rewards.{name}: {error}") from error
        columns |= dict.fromkeys(_columns(name, reward), name)
        if not math.isfinite(config.weight):
            raise ValueError(f"rewards.{name}.weight = {config.weight}, must be a finite number")
        for task in config.tasks or ():
            if tasks is not None and task not in tasks:
                raise ValueError(f"rewards.{name}.tasks: {unknown_name('task', task, tasks)}")
    for name, config in rewards.items():
        if config.condition is None:
            continue
        key, other = f"rewards.{name}.condition", config.condition.column
        if other not in columns:
            raise ValueError(f"{key}.column: {unknown_name('reward column', other, columns)}")
        if columns[other] == name:
            raise ValueError(f"{key}.column = {other!r}: a reward cannot depend on itself")
        if rewards[columns[other]].when_needed and not config.when_needed:
            raise ValueError(f"{key}.column = {other!r}: that column is not always computed; drop its when_needed")
        if not math.isfinite(config.condition.at_least):
            raise ValueError(f"{key}.at_least = {config.condition.at_least}, must be a finite number")


class Scorer:
    """All rewards of a recipe, ready to score rollouts.

    Args:
        rewards: the recipe's section, by column name.
        needed: columns the estimator asks for; rewards marked `when_needed` are computed only if they are among them.
        workers: rollouts scored at a time where a reward waits for other processes (its attribute `concurrent` is true);
            None: this process's share of the processors.

    Raises:
        ValueError: a bad name or parameter, or a condition on a column that is not computed.
    """

    def __init__(
        self, rewards: Mapping[str, RewardConfig], needed: Collection[str] = (), workers: int | None = None
    ) -> None:
        self.configs = {name: config for name, config in rewards.items() if not config.when_needed or name in needed}
        self._rewards = {name: make_reward(config.reward, **config.params) for name, config in self.configs.items()}
        for name, config in self.configs.items():
            if config.condition is not None and config.condition.column not in self.columns:
                problem = unknown_name("reward column", config.condition.column, self.columns)
                raise ValueError(f"rewards.{name}.condition.column: {problem}")
        concurrent = any(getattr(reward, "concurrent", False) for reward in self._rewards.values())
        self._workers = (workers or _processor_share()) if concurrent else 1

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the numbers every rollout gets, in order."""
        return tuple(column for name, reward in self._rewards.items() for column in _columns(name, reward))

    def score(
        self,
        completions: Sequence[str],
        samples: Sequence[Sample],
        finish_reasons: Sequence[str] | None = None,
        num_tokens: Sequence[int] | None = None,
    ) -> list[dict[str, float]]:
        """One dict per rollout: column name to value, in the order of `columns`.

        A reward that returns several numbers gives the columns `<name>.<part>`. Where `tasks` keeps a reward from a
        sample, its columns are 0; so they are where its `condition` is not met.

        Args:
            completions: text of each rollout's response.
            samples: the sample each rollout answers.
            finish_reasons: `stop` or `length` of each rollout; None: all stopped.
            num_tokens: response length of each rollout; needed by rewards on length.

        Raises:
            RewardError: a reward raised or returned no finite number; names column and sample.
        """
        count = len(completions)
        for what, other in (("samples", samples), ("finish_reasons", finish_reasons), ("num_tokens", num_tokens)):
            if other is not None and len(other) != count:
                raise ValueError(f"{len(other)} {what} for {count} completions")
        mappings = [sample.as_mapping() for sample in samples]
        for index, mapping in enumerate(mappings):
            if finish_reasons is not None:
                mapping["finish_reason"] = finish_reasons[index]
            if num_tokens is not None:
                mapping["num_tokens"] = num_tokens[index]
        if self._workers == 1:
            return list(map(self._row, completions, samples, mappings))
        with ThreadPoolExecutor(self._workers) as pool:
            return list(pool.map(self._row, completions, samples, mappings))

    def _row(self, completion: str, sample: Sample, mapping: Mapping[str, Any]) -> dict[str, float]:
        row: dict[str, float] = {}
        for name, reward in self._rewards.items():
            tasks = self.configs[name].tasks
            if tasks is None or sample.task in tasks:
                row |= _score(name, reward, completion, sample.id, mapping)
            else:
                row |= dict.fromkeys(_columns(name, reward), 0.0)
        raw = dict(row)
        for name, config in self.configs.items():
            if config.condition is not None:
                for column in _columns(name, self._rewards[name]):
                    gate = raw[config.condition.column]
                    row[column] = condition_reward(raw[column], gate, config.condition.at_least)
        return row

    def timeouts(self) -> dict[str, int]:
        """Per reward with a deadline: how many of its calls ran into it so far."""
        return {name: reward.isolated.timeouts for name, reward in self._rewards.items() if hasattr(reward, "isolated")}


def _processor_share() -> int:
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def condition_reward(value: float, gate: float, threshold: float) -> float:
    """`value` where the gate reaches the threshold, else 0 (GDPO, Eq. 8). Both are raw rewards, before any weight."""
    return value if gate >= threshold else 0.0


def score_rollouts(
    completions: Sequence[str],
    samples: Sequence[Sample],
    rewards: Mapping[str, RewardConfig],
    needed: Collection[str] = (),
    finish_reasons: Sequence[str] | None = None,
    num_tokens: Sequence[int] | None = None,
) -> list[dict[str, float]]:
    """`Scorer(rewards, needed).score(...)`, for a single call. A run keeps one `Scorer`: its helpers stay warm."""
    return Scorer(rewards, needed).score(completions, samples, finish_reasons, num_tokens)


def _columns(name: str, reward: Reward) -> tuple[str, ...]:
    """Column names of a reward: its own, or one per part it declares in an attribute `columns`."""
    parts = getattr(reward, "columns", None)
    return (name,) if parts is None else tuple(f"{name}.{part}" for part in parts)


def _score(name: str, reward: Reward, completion: str, sample_id: str, mapping: Mapping[str, Any]) -> dict[str, float]:
    try:
        score: Any = reward(completion, mapping)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise RewardError(f"the reward {name!r} failed on sample {sample_id}: {text}") from error
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
