"""Metrics of a step that come from its rollouts and rewards (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from megatron_rl.data.rewards import RewardTable
from megatron_rl.data.rollout import Rollouts


def reward_metrics(table: RewardTable) -> dict[str, float]:
    """`reward/mean` and `reward/std` of the weighted sum of all columns, over all rollouts; see `RewardTable.filled`."""
    total = sum(table.weight(name) * table.filled[:, :, i] for i, name in enumerate(table.names))
    assert isinstance(total, torch.Tensor)
    return {"reward/mean": float(total.mean()), "reward/std": float(total.std(correction=0))}


def response_metrics(rollouts: Rollouts) -> dict[str, float]:
    lengths = rollouts.facts["length"].astype(np.float64)
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
