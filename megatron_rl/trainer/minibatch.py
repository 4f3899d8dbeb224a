"""A step's rollouts as minibatches: which rollouts are trained on, and what the policy loss reads of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megatron_rl.actor.packing import MicroBatch
from megatron_rl.algorithms import StepEstimate
from megatron_rl.algorithms.aggregation import Denominators
from megatron_rl.data import Rollout, TokenBatch, TrainBatch


@dataclass
class PolicyTokens:
    """Inputs of the policy loss for one micro-batch besides the new log-probs; all [scored tokens], float32 but the ids."""

    sequence_ids: Tensor  # int64: which rollout of the micro-batch a token belongs to
    advantages: Tensor  # each rollout's on all of its tokens
    old_log_probs: Tensor | None  # of the policy before the step's first update; None until that update computes them
    rollout_log_probs: Tensor  # the engine's
    ref_log_probs: Tensor | None = None  # the reference policy's, where the loss has a KL term
    log_probs: Tensor | None = None  # of the policy when it was last updated on these tokens, before that update


@dataclass
class Minibatch:
    """One optimizer step's share of this data-parallel rank. `tokens`: per micro-batch; [] except on the last stage."""

    micro_batches: list[MicroBatch]
    tokens: list[PolicyTokens] = field(default_factory=list)
    denominators: Denominators = field(default_factory=lambda: Denominators(0.0, 0.0))  # of all ranks' shares


def was_truncated(rollouts: Sequence[Rollout]) -> Tensor:
    """bool [rollouts]: those that were cut at the token limit."""
    return torch.tensor([rollout.finish_reason == "length" for rollout in rollouts])


def train_batch(rollouts: Sequence[Rollout], estimate: StepEstimate) -> TrainBatch:
    """The rollouts that are trained on, with their advantages."""
    group_size = estimate.train.shape[1]
    trained = estimate.train.flatten().tolist()
    advantages = estimate.advantages.flatten().tolist()
    kept = [i for i, keep in enumerate(trained) if keep]
    return TrainBatch(
        sequences=TokenBatch.of(rollouts[i] for i in kept),
        rollout_logprobs=[rollouts[i].logprobs for i in kept],
        advantages=np.array([advantages[i] for i in kept], dtype=np.float32),
        group=np.array([i // group_size for i in kept], dtype=np.int64),
    )


def minibatches(group: np.ndarray, count: int) -> list[list[int]]:
    """Rows of the batch in at most `count` parts of nearly equal numbers of whole groups."""
    groups = list(dict.fromkeys(group.tolist()))
    parts = np.array_split(np.array(groups), min(count, len(groups)))
    return [[row for row, g in enumerate(group.tolist()) if g in members] for members in map(set, parts)]
