"""From a recipe's `rewards` section to named numbers per rollout."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from megatron_rl.config.schema import RewardConfig
from megatron_rl.names import unknown_name
from megatron_rl.rewards.registry import Reward, Score, make_reward

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
    for column, config in rewards.items():
        try:
            make_reward(config.reward, **config.params)
        except ValueError as error:
            raise ValueError(f"rewards.{column}: {error}") from error
        if not math.isfinite(config.weight):
            raise ValueError(f"rewards.{column}.weight = {config.weight}, must be a finite number")
        for task in config.tasks or ():
            if tasks is not None and task not in tasks:
                raise ValueError(f"rewards.{column}.tasks: {unknown_name('task', task, tasks)}")


class Scorer:
    """All rewards of a recipe, ready to score rollouts.

    Args:
        rewards: the recipe's section, by column name.
        needed: columns the estimator asks for; those marked `when_needed` are computed only if they are among them.
    """

    def __init__(self, rewards: Mapping[str, RewardConfig], needed: Collection[str] = ()) -> None:
        self.configs = {
            column: config for column, config in rewards.items() if not config.when_needed or column in needed
        }
        self._rewards = {column: make_reward(config.reward, **config.params) for column, config in self.configs.items()}

    def score(
        self,
        completions: Sequence[str],
        samples: Sequence[Sample],
        finish_reasons: Sequence[str] | None = None,
        num_tokens: Sequence[int] | None = None,
    ) -> list[dict[str, float]]:
        """One dict per rollout: column name to value.

        A reward that returns several numbers gives the columns `<column>.<name>`. Where `tasks` keeps a reward from a
        sample, its columns are 0.

        Args:
            completions: text of each rollout's response.
            samples: the sample each rollout answers.
            finish_reasons: `stop` or `length` of each rollout; None: all stopped.
            num_tokens: response length of each rollout; needed by rewards on length.

        Raises:
            RewardError: a reward raised or returned no finite number; names column and sample.
        """
        count = len(completions)
        for name, other in (("samples", samples), ("finish_reasons", finish_reasons), ("num_tokens", num_tokens)):
            if other is not None and len(other) != count:
                raise ValueError(f"{len(other)} {name} for {count} completions")
        rows: list[dict[str, float]] = [{} for _ in range(count)]
        for column, reward in self._rewards.items():
            tasks = self.configs[column].tasks
            scores: list[dict[str, float] | None] = []
            for index, (completion, sample) in enumerate(zip(completions, samples, strict=True)):
                if tasks is not None and sample.task not in tasks:
                    scores.append(None)
                    continue
                mapping = sample.as_mapping()
                if finish_reasons is not None:
                    mapping["finish_reason"] = finish_reasons[index]
                if num_tokens is not None:
                    mapping["num_tokens"] = num_tokens[index]
                scores.append(_columns(column, reward, completion, sample.id, mapping))
            _add(column, scores, rows, samples)
        return rows

    def timeouts(self) -> dict[str, int]:
        """Per column whose reward has a deadline: how many calls ran into it so far."""
        return {
            column: reward.isolated.timeouts for column, reward in self._rewards.items() if hasattr(reward, "isolated")
        }


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


def _columns(
    column: str, reward: Reward, completion: str, sample_id: str, mapping: Mapping[str, Any]
) -> dict[str, float]:
    try:
        score: Score = reward(completion, mapping)
    except Exception as error:
        raise RewardError(
            f"the reward {column!r} failed on sample {sample_id}: {type(error).__name__}: {error}"
        ) from error
    named = (
        {f"{column}.{name}": value for name, value in score.items()} if isinstance(score, Mapping) else {column: score}
    )
    value: Any
    for name, value in named.items():
        if not isinstance(value, Real) or not math.isfinite(value):
            raise RewardError(f"the reward {name!r} is {value!r} on sample {sample_id}, not a finite number")
    return {name: float(value) for name, value in named.items()}


def _add(
    column: str, scores: list[dict[str, float] | None], rows: list[dict[str, float]], samples: Sequence[Sample]
) -> None:
    names = next((list(score) for score in scores if score is not None), [column])
    for row, score, sample in zip(rows, scores, samples, strict=True):
        if score is None:
            score = dict.fromkeys(names, 0.0)
        if list(score) != names:
            raise RewardError(
                f"the reward {column!r} returns {list(score)} on sample {sample.id}, but {names} elsewhere"
            )
        row.update(score)
