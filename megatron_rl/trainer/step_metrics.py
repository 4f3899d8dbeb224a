"""Metrics of a step that come from its rollouts and rewards (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from megatron_rl.config.schema import RewardConfig
from megatron_rl.data.rewards import RewardTable
from megatron_rl.data.rollout import Rollouts


def reward_metrics(table: RewardTable, rollouts: Rollouts) -> dict[str, float]:
    """`reward/mean` and `reward/std` of the weighted sum of all columns, over all rollouts but lost
    ones; see `RewardTable.filled`. Of a
    reward per token the mean over the rollout counts."""
    by_token = np.nan_to_num(rollouts.rewards[:, len(table.names) :]).reshape(*table.mask.shape, -1)
    columns = [*table.filled.unbind(2), *torch.from_numpy(by_token).unbind(2)]
    weights = [*map(table.weight, table.names), *rollouts.token_weights.values()]
    total = sum(weight * column for weight, column in zip(weights, columns, strict=True))
    assert isinstance(total, torch.Tensor)
    total = total[table.mask] if 0 < table.mask.sum() < total.numel() else total
    return {"reward/mean": float(total.mean()), "reward/std": float(total.std(correction=0))}


def token_reward_metrics(rollouts: Rollouts, rewards: Mapping[str, RewardConfig]) -> dict[str, float]:
    """Means of rewards per token over the response tokens that they scored; and the reverse KL, all teachers' mean with the
    other sign."""
    metrics, teachers = dict[str, float](), list[tuple[float, float]]()
    lengths = rollouts.facts["length"].astype(np.float64)
    tasks = [sample.task for sample in rollouts.samples for _ in range(rollouts.count)]
    for name in rollouts.token_weights:
        means, only = rollouts.rewards[:, rollouts.columns.index(name)], rewards[name].tasks
        scored = ~np.isnan(means) & np.array([only is None or task in only for task in tasks])
        total, tokens = float((means[scored] * lengths[scored]).sum()), float(lengths[scored].sum())
        if tokens:
            metrics[f"reward/{name}"] = total / tokens
            teachers += [(total, tokens)] if rewards[name].reward == "teacher" else []
    if teachers:
        metrics["distillation/reverse_kl"] = -sum(total for total, _ in teachers) / sum(
            tokens for _, tokens in teachers
        )
    return metrics


def response_metrics(rollouts: Rollouts) -> dict[str, float]:
    lengths = rollouts.facts["length"][~rollouts.facts["lost"]].astype(np.float64)
    lengths = lengths if len(lengths) else np.zeros(1)
    return {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/truncated_share": int(rollouts.facts["truncated"].sum()) / len(rollouts),
        "prompt_length/mean": float(rollouts.prompt_lengths.mean()),
    }


def throughput(rollouts: Rollouts, seconds: Mapping[str, float]) -> dict[str, float]:
    """Tokens per second of the whole world: generated while generating, and trained on per whole step."""
    generated, total = (int(rollouts.facts[name].sum()) for name in ("length", "num_tokens"))
    return {
        "perf/generated_tokens_per_s": generated / seconds["timing_s/generate"],
        "perf/tokens_per_s": total / seconds["timing_s/step"],
        "perf/total_tokens": float(total),
    }
