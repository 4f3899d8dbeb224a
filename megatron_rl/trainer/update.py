"""Rollouts and advantages to new weights: the learning half of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_rl.actor.actor import UpdateResult
from megatron_rl.actor.packing import MicroBatch
from megatron_rl.algorithms import StepEstimate
from megatron_rl.algorithms.aggregation import Denominators
from megatron_rl.algorithms.kl import sequence_kl
from megatron_rl.algorithms.metrics import Metrics
from megatron_rl.data import Rollout, TrainBatch
from megatron_rl.trainer.context import Run
from megatron_rl.trainer.record import TokenLog


def train_batch(rollouts: Sequence[Rollout], estimate: StepEstimate) -> TrainBatch:
    """The rollouts that are trained on, with their advantages."""
    group_size = estimate.train.shape[1]
    trained = estimate.train.flatten().tolist()
    advantages = estimate.advantages.flatten().tolist()
    kept = [i for i, keep in enumerate(trained) if keep]
    return TrainBatch(
        prompt_ids=[rollouts[i].prompt_ids for i in kept],
        response_ids=[rollouts[i].response_ids for i in kept],
        rollout_logprobs=[rollouts[i].logprobs for i in kept],
        advantages=np.array([advantages[i] for i in kept], dtype=np.float32),
        group=np.array([i // group_size for i in kept], dtype=np.int64),
    )


def minibatches(group: np.ndarray, count: int) -> list[list[int]]:
    """Rows of the batch in at most `count` parts of nearly equal numbers of whole groups."""
    groups = list(dict.fromkeys(group.tolist()))
    parts = np.array_split(np.array(groups), min(count, len(groups)))
    return [[row for row, g in enumerate(group.tolist()) if g in members] for members in map(set, parts)]


def update(
    run: Run,
    batch: TrainBatch,
    clip_range: tuple[float, float] | None,
    log: TokenLog | None = None,
    measure_variance: bool = False,
) -> dict[str, float]:
    """Every optimizer step of one batch of rollouts: `epochs` passes over `minibatches` parts of it.

    `log`, where given, receives the log-probs of this rank's share. With `measure_variance` the metrics have the variance
    of the first update's gradient.

    The old policy's log-probs are recomputed by the actor, in the packing that the update uses, before the first step: the
    ratio is then exactly 1 on the first minibatch, and the engine's rounding does not enter the loss.
    """
    config, actor, algorithm = run.config, run.actor, run.algorithm
    temperature = config.rollout.temperature
    parts = [
        actor.micro_batches(rows, batch.prompt_ids, batch.response_ids)
        for rows in minibatches(batch.group, config.trainer.minibatches)
    ]
    entropy = Metrics()
    with run.phases("old_log_prob"):
        for micro_batches in parts:
            scored = actor.log_probs(micro_batches, temperature, with_entropy=True)
            for micro, (log_probs, token_entropy) in zip(micro_batches, scored, strict=False):
                micro.extra["old_log_probs"] = log_probs
                micro.extra["rollout_log_probs"] = micro.concatenate(batch.rollout_logprobs)
                micro.extra["advantages"] = micro.spread(batch.advantages)
                assert token_entropy is not None
                own = Metrics()
                own.mean("actor/entropy", token_entropy, _everything(micro))
                entropy = entropy + own
    if algorithm.needs_reference:
        with run.phases("ref_log_prob"), actor.as_reference():
            for micro_batches in parts:
                for micro, (log_probs, _) in zip(
                    micro_batches, actor.log_probs(micro_batches, temperature), strict=False
                ):
                    micro.extra["ref_log_probs"] = log_probs
    denominators = _denominators(run, parts)
    metrics = actor.reduce([entropy])
    norms: list[float] = []
    variance: dict[str, float] = {}
    run.stop.check(run.grid)  # from here on the weights change: the step is finished
    with run.phases("update"):
        for _ in range(config.trainer.epochs):
            for micro_batches, whole in zip(parts, denominators, strict=True):

                def loss(
                    micro: MicroBatch, log_probs: Tensor, token_entropy: Tensor | None, whole: Denominators = whole
                ) -> tuple[Tensor, Metrics]:
                    if log is not None:
                        micro.extra["log_probs"] = log_probs.detach()
                    return algorithm.policy_loss(
                        log_probs,
                        micro.extra["old_log_probs"],
                        micro.extra["rollout_log_probs"],
                        micro.extra.get("ref_log_probs"),
                        token_entropy,
                        micro.extra["advantages"],
                        _everything(micro),
                        sequence_ids=micro.sequence_ids,
                        denominators=whole,
                        clip_range=clip_range,
                    )

                part_size = _part_size(algorithm.config.aggregation) if measure_variance and not norms else None
                result = actor.update(micro_batches, loss, temperature, algorithm.needs_entropy, part_size)
                if part_size is not None:
                    variance = _variance_metrics(result)
                metrics = metrics + result.metrics
                norms.append(result.grad_norm)
    if log is not None and run.grid.reports_loss:
        for micro_batches in parts:
            log.add(micro_batches)
    return (
        metrics.values()
        | variance
        | {
            "actor/grad_norm": float(np.mean(norms)),
            "actor/grad_norm_max": max(norms),
            "actor/lr": result.learning_rate,
            "actor/updates": float(len(norms)),
        }
    )


def _part_size(aggregation: str) -> Callable[[MicroBatch], float]:
    """How much of the minibatch's loss a micro-batch is."""
    if aggregation == "token-mean":
        return lambda micro: float(micro.targets.numel())
    return lambda micro: float(len(micro.rows))


def _variance_metrics(result: UpdateResult) -> dict[str, float]:
    """Trace of the gradient's covariance, and its share of the squared norm; more than 1 is nothing but noise."""
    metrics = {"gradient/parts": float(result.gradient_parts)}
    if result.gradient_variance is not None:
        metrics["gradient/variance"] = result.gradient_variance
        metrics["gradient/variance_share"] = result.gradient_variance / max(result.grad_norm**2, 1e-300)
    return metrics


def _everything(micro: MicroBatch) -> Tensor:
    return torch.ones_like(micro.targets, dtype=torch.bool)


def _denominators(run: Run, parts: Sequence[Sequence[MicroBatch]]) -> list[Denominators]:
    """Of every minibatch, over all micro-batches and data-parallel ranks, after correction filters."""
    own = []
    for micro_batches in parts:
        whole = Denominators(0.0, 0.0)
        if run.grid.reports_loss:
            for micro in micro_batches:
                whole = whole + run.algorithm.count(
                    _everything(micro),
                    micro.sequence_ids,
                    old_log_probs=micro.extra["old_log_probs"],
                    rollout_log_probs=micro.extra["rollout_log_probs"],
                )
        own.append((float(whole.num_tokens), float(whole.num_sequences)))
    ranks = run.grid.all_gather(own)
    return [
        Denominators(sum(rank[i][0] for rank in ranks), sum(rank[i][1] for rank in ranks)) for i in range(len(parts))
    ]


def reference_kl(run: Run, rollouts: Sequence[Rollout], shape: tuple[int, int]) -> Tensor | None:
    """KL of every rollout from the reference policy, float64 [prompts, group size]; None where no reward uses it."""
    kl = run.config.algorithm.kl
    if not kl.reward_coef:
        return None
    temperature = run.config.rollout.temperature
    own: dict[int, float] = {}
    with run.phases("ref_log_prob"):
        micro_batches = run.actor.micro_batches(
            range(len(rollouts)), [r.prompt_ids for r in rollouts], [r.response_ids for r in rollouts]
        )
        old = run.actor.log_probs(micro_batches, temperature)
        with run.actor.as_reference():
            reference = run.actor.log_probs(micro_batches, temperature)
        for micro, (log_probs, _), (ref_log_probs, _) in zip(micro_batches, old, reference, strict=False):
            values = sequence_kl(log_probs, ref_log_probs, micro.sequence_ids, kl.reward_estimator)
            own.update(zip(micro.rows, values.tolist(), strict=True))
    merged: dict[int, float] = {}
    for part in run.grid.all_gather(own if run.grid.reports_loss else {}):
        merged.update(part)
    return torch.tensor([merged[row] for row in range(len(rollouts))], dtype=torch.float64).view(shape)
