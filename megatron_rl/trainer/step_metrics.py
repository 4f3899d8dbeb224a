"""Metrics of a step that come from its rollouts and rewards (docs/metrics.md)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch

from megatron_rl.config.schema import RewardConfig
from megatron_rl.data.rewards import RewardTable
from megatron_rl.data.rollout import Rollout, Rollouts
from megatron_rl.data.sample import Sample
from megatron_rl.runtime.distributed import ProcessGrid


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


def conversation_metrics(grid: ProcessGrid, rollouts: Rollouts) -> dict[str, float]:
    """Turns and tool calls of a step's conversations without lost ones, and shares of those that failed. Each rank
    counts what it hands out."""
    if all(sample.agent is None for sample in rollouts.samples):
        return {}
    counts, rewarded = Counter[str](), defaultdict[tuple[int, str], list[float]](list)
    for row, rollout in rollouts.held.items():
        if rollouts.facts["source"][row] == grid.rank and not rollouts.facts["lost"][row]:
            _count(counts, rollouts.sample(row), rollout)
            for column, rewards in rollout.turn_rewards.items():
                for turn, reward in enumerate(rewards, start=1):
                    rewarded[turn, column].append(reward)
    total = Counter[str]()
    sums = {key: (len(rewards), math.fsum(rewards)) for key, rewards in rewarded.items()}
    means = defaultdict[tuple[int, str], np.ndarray](lambda: np.zeros(2))
    for part, sums_of_part in grid.all_gather((counts, sums)):
        for key, number_and_sum in sums_of_part.items():
            means[key] += number_and_sum
        total.update(part)
    longest = max((int(name.removeprefix("turn ")) for name in total if name.startswith("turn ")), default=0)
    lost = int(rollouts.facts["lost"].sum())
    number = max(1, len(rollouts) - lost)
    metrics: dict[str, float] = {
        "conversation/failed_infrastructure": lost / len(rollouts),
        "conversation/failed_model": total["failed"] / number,
        "conversation/turns": sum(total[f"turn {turn}"] for turn in range(1, longest + 1)) / number,
        "conversation/turns_max": float(longest),
        "conversation/sequences": total["sequences"] / number,
        "conversation/environment_tokens": total["environment tokens"] / number,
        "conversation/tool_calls": total["calls"] / number,
    }
    for turn in range(1, longest + 1):
        metrics[f"conversation/turn_{turn}/share"] = total[f"turn {turn}"] / number
        metrics[f"conversation/turn_{turn}/tokens"] = total[f"tokens of turn {turn}"] / total[f"turn {turn}"]
    for turn, column in sorted(means):
        metrics[f"conversation/turn_reward/{column}/{turn}"] = means[turn, column][1] / means[turn, column][0]
    for name in sorted(name.removeprefix("call ") for name in total if name.startswith("call ")):
        metrics[f"conversation/calls/{name}"] = total[f"call {name}"] / number
    return metrics


def _count(counts: Counter[str], sample: Sample, rollout: Rollout) -> None:
    for number, tokens in enumerate(rollout.turn_lengths, start=1):
        counts[f"turn {number}"] += 1
        counts[f"tokens of turn {number}"] += tokens
    counts["failed"] += rollout.failed_by == "model"
    counts["environment tokens"] += rollout.num_tokens - len(rollout.prompt_ids) - rollout.length
    listed = tool_names(sample)
    counts["sequences"] += max(1, len(rollout.conversations))
    for messages, turns_of in rollout.spoken:
        for message in (messages[i] for i in turns_of):
            for call in cast(list[Any], message.get("tool_calls") or []):
                name = call["function"]["name"]
                counts["calls"] += 1
                counts[f"call {name if name in listed else 'unlisted'}"] += 1


def tool_names(sample: Sample) -> set[str]:
    """Names of the tools that a prompt lists. One that the model makes up is no name of a metric."""
    tools = cast(list[Any], sample.metadata.get("tools") or [])
    return {str(tool.get("function", tool).get("name")) for tool in tools}


def throughput(rollouts: Rollouts, seconds: Mapping[str, float]) -> dict[str, float]:
    """Tokens per second of the whole world: generated while generating, and trained on per whole step."""
    generated, total = (int(rollouts.facts[name].sum()) for name in ("length", "num_tokens"))
    generated = generated if rollouts.drawn is None else rollouts.drawn
    return {
        "perf/generated_tokens_per_s": generated / seconds["timing_s/generate"],
        "perf/tokens_per_s": total / seconds["timing_s/step"],
        "perf/total_tokens": float(total),
    }
