"""Metrics of a step that come from its rollouts and rewards (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from megatron_rl.data import RewardTable, Rollout


def reward_metrics(table: RewardTable) -> dict[str, float]:
    """`reward/mean` and `reward/std` of the weighted sum of all columns, over all rollouts; see `RewardTable.filled`."""
    total = sum(table.weight(name) * table.filled[:, :, i] for i, name in enumerate(table.names))
    assert isinstance(total, torch.Tensor)
    return {"reward/mean": float(total.mean()), "reward/std": float(total.std(correction=0))}


def response_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    lengths = np.array([len(rollout.response_ids) for rollout in rollouts], dtype=np.float64)
    reasons = [rollout.finish_reason for rollout in rollouts]
    return {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/truncated_share": reasons.count("length") / len(reasons),
        "prompt_length/mean": float(np.mean([len(rollout.prompt_ids) for rollout in rollouts])),
    }


def throughput(rollouts: Sequence[Rollout], seconds: Mapping[str, float]) -> dict[str, float]:
    """Tokens per second of the whole world: generated while generating, and trained on per whole step."""
    generated = sum(len(rollout.response_ids) for rollout in rollouts)
    total = sum(rollout.num_tokens for rollout in rollouts)
    return {
        "perf/generated_tokens_per_s": generated / seconds["timing_s/generate"],
        "perf/tokens_per_s": total / seconds["timing_s/step"],
        "perf/total_tokens": float(total),
    }
