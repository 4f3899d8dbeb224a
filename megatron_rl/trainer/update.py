"""Rollouts and advantages to new weights: the learning half of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megatron_rl.actor.actor import UpdateResult
from megatron_rl.actor.packing import MicroBatch
from megatron_rl.algorithms import Algorithm
from megatron_rl.algorithms.aggregation import Denominators
from megatron_rl.algorithms.kl import sequence_kl
from megatron_rl.algorithms.metrics import Metrics
from megatron_rl.data import Rollout, TokenBatch, TrainBatch
from megatron_rl.trainer.context import Run
from megatron_rl.trainer.minibatch import Minibatch, PolicyTokens, minibatches
from megatron_rl.trainer.record import TokenLog


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
    parts, metrics = _old_policy(run, batch)
    if algorithm.needs_reference:
        with run.phases("ref_log_prob"), actor.as_reference():
            for part in parts:
                reference = actor.log_probs(part.micro_batches, temperature)
                for tokens, (log_probs, _) in zip(part.tokens, reference, strict=True):
                    tokens.ref_log_probs = log_probs
    denominators = _denominators(run, parts)
    norms: list[float] = []
    variance: dict[str, float] = {}
    run.stop.check(run.grid)  # from here on the weights change: the step is finished
    with run.phases("update"):
        for _ in range(config.trainer.epochs):
            for part, whole in zip(parts, denominators, strict=True):
                loss = partial(_loss, algorithm, part.tokens, whole, clip_range)
                part_size = _part_size(algorithm.config.aggregation) if measure_variance and not norms else None
                result = actor.update(part.micro_batches, loss, temperature, algorithm.needs_entropy, part_size)
                if part_size is not None:
                    variance = _variance_metrics(result)
                metrics = metrics + result.metrics
                norms.append(result.grad_norm)
    if log is not None and run.grid.reports_loss:
        for part in parts:
            log.add(part)
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


def _old_policy(run: Run, batch: TrainBatch) -> tuple[list[Minibatch], Metrics]:
    """The minibatches, packed, with the old policy's log-probs; and its entropy."""
    actor, parts, entropy = run.actor, list[Minibatch](), Metrics()
    with run.phases("old_log_prob"):
        for rows in minibatches(batch.group, run.config.trainer.minibatches):
            micro_batches = actor.micro_batches(batch.sequences, rows)
            part = Minibatch(micro_batches)
            scored = actor.log_probs(micro_batches, run.config.rollout.temperature, with_entropy=True)
            for micro, (log_probs, token_entropy) in zip(micro_batches, scored, strict=False):
                assert token_entropy is not None
                own = Metrics()
                own.mean("actor/entropy", token_entropy, _everything(token_entropy))
                entropy = entropy + own
                part.tokens.append(
                    PolicyTokens(
                        sequence_ids=micro.sequence_ids,
                        advantages=micro.spread(batch.advantages),
                        old_log_probs=log_probs,
                        rollout_log_probs=micro.concatenate(batch.rollout_logprobs),
                    )
                )
            parts.append(part)
    return parts, actor.reduce([entropy])


def _loss(
    algorithm: Algorithm,
    tokens: Sequence[PolicyTokens],
    denominators: Denominators,
    clip_range: tuple[float, float] | None,
    number: int,
    log_probs: Tensor,
    entropy: Tensor | None,
) -> tuple[Tensor, Metrics]:
    """The policy loss of micro-batch `number` of a minibatch."""
    known = tokens[number]
    known.log_probs = log_probs.detach()
    return algorithm.policy_loss(
        log_probs,
        known.old_log_probs,
        known.rollout_log_probs,
        known.ref_log_probs,
        entropy,
        known.advantages,
        _everything(log_probs),
        sequence_ids=known.sequence_ids,
        denominators=denominators,
        clip_range=clip_range,
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


def _everything(tokens: Tensor) -> Tensor:
    return torch.ones_like(tokens, dtype=torch.bool)


def _denominators(run: Run, parts: Sequence[Minibatch]) -> list[Denominators]:
    """Of every minibatch, over all micro-batches and data-parallel ranks, after correction filters."""
    own = []
    for part in parts:
        whole = Denominators(0.0, 0.0)
        for tokens in part.tokens if run.grid.reports_loss else ():
            whole = whole + run.algorithm.count(
                _everything(tokens.old_log_probs),
                tokens.sequence_ids,
                old_log_probs=tokens.old_log_probs,
                rollout_log_probs=tokens.rollout_log_probs,
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
        micro_batches = run.actor.micro_batches(TokenBatch.of(rollouts))
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
