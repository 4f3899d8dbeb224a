"""A step's rollouts as minibatches: which rollouts are trained on, and what the policy loss reads of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megatron_rl.actor.packing import MicroBatch
from megatron_rl.algorithms import Algorithm, StepAdvantages
from megatron_rl.algorithms.aggregation import Denominators
from megatron_rl.data.batch import TokenBatch, TrainBatch
from megatron_rl.data.rollout import Rollout, Rollouts
from megatron_rl.methods.tokens import RolloutTokens


@dataclass
class PolicyTokens:
    """Inputs of the policy loss for one micro-batch besides the new log-probs; all [scored tokens], float32 but the ids."""

    sequence_ids: Tensor  # int64: which rollout of the micro-batch a token belongs to
    advantages: Tensor
    old_log_probs: Tensor | None  # of the policy before the step's first update; None until that update computes them
    rollout_log_probs: Tensor  # the engine's
    ref_log_probs: Tensor | None = None  # the reference policy's, where the loss has a KL term
    log_probs: Tensor | None = None  # of the policy when it was last updated on these tokens, before that update
    gradient_weights: Tensor | None = None  # at recorded steps: minus the gradient of that update's loss by them


@dataclass
class Minibatch:
    """One optimizer step's share of this data-parallel rank. `tokens`: per micro-batch; [] except on the last stage."""

    micro_batches: list[MicroBatch]
    tokens: list[PolicyTokens] = field(default_factory=list)
    denominators: Denominators = field(default_factory=lambda: Denominators(0.0, 0.0))  # of all ranks' shares


def trained_rows(estimate: StepAdvantages) -> np.ndarray:
    """int64 [trained rollouts]: the step's rows of those that are trained on."""
    return np.flatnonzero(estimate.train.flatten().numpy())


def train_batch(
    rollouts: Rollouts, estimate: StepAdvantages, own: Mapping[int, Rollout], algorithm: Algorithm
) -> TrainBatch:
    """The rollouts that are trained on, with an advantage per token. `own`: those whose tokens this rank has, by row."""
    rows = trained_rows(estimate)
    known = {i: own[row] for i, row in enumerate(rows.tolist()) if row in own}
    advantages = estimate.advantages.flatten().numpy()[rows].astype(np.float32)
    return TrainBatch(
        sequences=TokenBatch.of(
            rollouts.facts["num_tokens"][rows].tolist(), known, {i: rollouts.sample(int(rows[i])) for i in known}
        ),
        rollout_logprobs={i: rollout.logprobs for i, rollout in known.items()},
        advantages={
            i: _token_advantages(algorithm, advantages[i], rollout, rollouts.token_weights)
            if estimate.turns is None
            else _turn_advantages(estimate.turns.flatten(0, 1)[rows[i]], rollout)
            for i, rollout in known.items()
        },
        group=rows // estimate.train.shape[1],
        by_token=algorithm.estimator.has_token_part or bool(rollouts.token_weights) or estimate.turns is not None,
    )


def _token_advantages(
    algorithm: Algorithm, advantage: np.float32, rollout: Rollout, weights: Mapping[str, float]
) -> np.ndarray:
    """float32 [sampled tokens]: the rollout's advantage on all of its tokens, or what the method's token part makes of it."""
    if not weights and not algorithm.estimator.has_token_part:
        return np.full(rollout.length, advantage)
    values = torch.zeros(rollout.length, 0)
    if weights:
        assert rollout.token_rewards is not None  # of the rank that scored it
        values = torch.from_numpy(np.nan_to_num(rollout.token_rewards))
    tokens = RolloutTokens(float(advantage), values, torch.tensor([*weights.values()]), tuple(weights))
    return algorithm.estimator.token_advantages(tokens).numpy()


def _turn_advantages(advantages: torch.Tensor, rollout: Rollout) -> np.ndarray:
    """float32 [sampled tokens]: on each the advantage of its turn. `advantages`: [turns, or more]."""
    lengths = rollout.turn_lengths
    return np.repeat(advantages.numpy().astype(np.float32)[: len(lengths)], lengths)


def minibatches(group: np.ndarray, count: int) -> list[list[int]]:
    """Rows of the batch in at most `count` parts of nearly equal numbers of whole groups; none of a batch without groups."""
    groups = list(dict.fromkeys(group.tolist()))
    if not groups:
        return []
    parts = np.array_split(np.array(groups), min(count, len(groups)))
    return [[row for row, g in enumerate(group.tolist()) if g in members] for members in map(set, parts)]
