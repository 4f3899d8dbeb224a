"""Scored responses of an evaluation -> named estimates, per task and over all tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_rl.config.schema import Config
from megatron_rl.data.rollout import Outcome
from megatron_rl.data.sample import Sample
from megatron_rl.evaluation.statistics import Interval, combine, mean, pass_at_k, sampling_error
from megatron_rl.evaluation.win_rates import controlled_win_rate, win_rate

Value = Callable[[Outcome], float]


@dataclass
class TaskSummary:
    """One task's numbers.

    Attributes:
        prompts, responses: numbers of prompts and of the responses to them.
        failed: requests that an endpoint did not answer; they are in no estimate.
        unscored: responses for which the column that decides has no value (a judge that did not answer); likewise.
        right_if: the reward column that says whether a response is right, and the least value that does.
        estimates: metric name (`eval/<task>/...`) -> estimate.
        sampling_stderr: of avg@k, over sampling seeds, with these prompts; None where a prompt has a single response.
    """

    task: str
    prompts: int
    responses: int
    failed: int
    unscored: int
    right_if: tuple[str, float]
    estimates: dict[str, Interval] = field(default_factory=dict)
    sampling_stderr: float | None = None


def passes(config: Config) -> list[int]:
    """The k of every pass@k: the recipe's, or 1, 2, 4, ... below the number of responses; and that number."""
    n = config.trainer.eval_rollouts
    chosen = config.evaluation.pass_k
    return sorted({*([2**i for i in range(n.bit_length()) if 2**i < n] if chosen is None else chosen), n})


def deciding_column(config: Config, task: str, columns: Sequence[str]) -> str:
    """The reward that says whether a response is right: `trainer.eval_reward`, or the first that is computed for the task.

    Raises:
        ValueError: no reward is computed for the task's prompts.
    """
    if config.trainer.eval_reward is not None:
        return config.trainer.eval_reward
    for column in columns:
        reward = config.rewards.get(column.partition(".")[0])
        if _applies(config, column, task) and reward is not None and not reward.when_needed:
            return column
    raise ValueError(f"no reward is computed for the eval task {task}; see rewards.<name>.tasks")


def summarize(
    config: Config, task: str, samples: Sequence[Sample], rollouts: Sequence[Outcome], failed: int = 0
) -> TaskSummary:
    """The estimates of one task.

    Args:
        samples: the task's prompts.
        rollouts: their scored responses, any order; fewer than `trainer.eval_rollouts` per prompt where requests failed.
            A prompt counts where it has a response, and in pass@k where it has k.
        failed: how many requests did.

    Raises:
        ValueError: no responses at all.
    """
    if not rollouts:
        raise ValueError(f"task {task}: none of its {failed} requests was answered, so there is nothing to evaluate")
    trainer, options = config.trainer, config.evaluation
    columns = list(rollouts[0].rewards)
    judge = deciding_column(config, task, columns)
    scored = [rollout for rollout in rollouts if not math.isnan(rollout.rewards[judge])]
    if not scored:
        raise ValueError(f"task {task}: the reward {judge!r} has no value for any response")
    groups = _by_prompt(scored)

    def over_prompts(value: Value, bounded: bool = True) -> Interval:
        return mean([sum(map(value, group)) / len(group) for group in groups], options.confidence, bounded)

    def of_column(column: str, value: Callable[[float], float], bounded: bool = True) -> Interval | None:
        scores = [[value(r.rewards[column]) for r in group if not math.isnan(r.rewards[column])] for group in groups]
        means = [sum(row) / len(row) for row in scores if row]
        return mean(means, options.confidence, bounded) if means else None

    def right(rollout: Outcome) -> float:
        return float(rollout.rewards[judge] >= trainer.eval_threshold)

    unscored = len(rollouts) - len(scored)
    summary = TaskSummary(task, len(samples), len(rollouts), failed, unscored, (judge, trainer.eval_threshold))
    estimates = summary.estimates
    estimates[f"eval/{task}/avg@{trainer.eval_rollouts}"] = over_prompts(right)
    for k in passes(config):
        counts = [(len(group), round(sum(map(right, group)))) for group in groups if len(group) >= k]
        if counts:
            estimates[f"eval/{task}/pass@{k}"] = mean([pass_at_k(n, c, k) for n, c in counts], options.confidence)
    estimates[f"eval/{task}/response_length"] = over_prompts(_length, bounded=False)
    estimates[f"eval/{task}/truncated_share"] = over_prompts(lambda rollout: float(rollout.finish_reason == "length"))
    if options.length_limit is not None:
        limit = options.length_limit
        estimates[f"eval/{task}/exceed_share"] = over_prompts(lambda rollout: float(_length(rollout) > limit))
    named: dict[str, tuple[str | None, Callable[[float], float]]] = {
        f"eval/{task}/format_ratio": (options.format_reward, lambda score: float(score >= 1)),
        f"eval/{task}/bug_ratio": (options.bug_reward, lambda score: float(score < 1)),
        f"eval/{task}/pass_rate": (options.pass_rate_reward, float),
    }
    for name, (column, value) in named.items():
        if column in columns and _applies(config, column, task) and (estimate := of_column(column, value)) is not None:
            estimates[name] = estimate
    both = options.pairwise
    if both is not None and all(_applies(config, column, task) for column in both):
        pairs = [(rollout.rewards[both[0]], rollout.rewards[both[1]]) for rollout in rollouts]
        if (estimate := win_rate(pairs)) is not None:
            estimates[f"eval/{task}/win_rate"] = estimate
        style_columns = [column for column in columns if column.partition(".")[0] == options.style]
        styles = [[rollout.rewards[column] for column in style_columns] for rollout in rollouts]
        if style_columns and (estimate := controlled_win_rate(pairs, styles)) is not None:
            estimates[f"eval/{task}/win_rate_controlled"] = estimate
    for column in columns:
        if _applies(config, column, task) and (estimate := of_column(column, float, bounded=False)) is not None:
            estimates[f"eval/{task}/reward/{column}"] = estimate
    summary.sampling_stderr = sampling_error([[right(rollout) for rollout in group] for group in groups])
    return summary


def overall(config: Config, summaries: Sequence[TaskSummary]) -> dict[str, Interval]:
    """Metrics that every task has, over all tasks: `eval_macro/<x>` is the mean of the tasks' means, `eval_micro/<x>` weights
    each task by its number of prompts. Empty for a single task."""
    if len(summaries) < 2:
        return {}
    names = [name.split("/", 2)[2] for name in summaries[0].estimates]
    metrics: dict[str, Interval] = {}
    for name in names:
        parts = [summary.estimates.get(f"eval/{summary.task}/{name}") for summary in summaries]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            continue
        bounded = name != "response_length" and not name.startswith("reward/")
        weights = [float(part.prompts) for part in known]
        metrics[f"eval_macro/{name}"] = combine(known, [1.0] * len(known), config.evaluation.confidence, bounded)
        metrics[f"eval_micro/{name}"] = combine(known, weights, config.evaluation.confidence, bounded)
    return metrics


def metrics_of(summaries: Sequence[TaskSummary], across: Mapping[str, Interval]) -> dict[str, float]:
    """The row of `metrics.jsonl`: every estimate's value, and the standard error of every avg@k."""
    metrics = {name: estimate.value for name, estimate in across.items()}
    for summary in summaries:
        metrics |= {name: estimate.value for name, estimate in summary.estimates.items()}
        error = next(iter(summary.estimates.values())).stderr
        if error is not None:
            metrics[f"eval/{summary.task}/stderr"] = error
        if summary.unscored:
            metrics[f"eval/{summary.task}/unscored"] = float(summary.unscored)
    return metrics


def _by_prompt(rollouts: Sequence[Outcome]) -> list[list[Outcome]]:
    groups: dict[str, list[Outcome]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.sample_id, []).append(rollout)
    return list(groups.values())


def _length(rollout: Outcome) -> float:
    return float(rollout.length)


def _applies(config: Config, column: str, task: str) -> bool:
    """Whether a reward column is computed for a task's prompts (elsewhere it is 0)."""
    reward = config.rewards.get(column.partition(".")[0])
    return reward is None or reward.tasks is None or task in reward.tasks
