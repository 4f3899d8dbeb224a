"""`megatron-rl reward-model`: a Bradley-Terry reward model on preference pairs, on the same actor that RL trains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.actor.actor import Actor
from megatron_rl.actor.packing import MicroBatch
from megatron_rl.algorithms.metrics import Metrics
from megatron_rl.algorithms.preference import bradley_terry_loss
from megatron_rl.data.batch import TokenBatch
from megatron_rl.runtime import device
from megatron_rl.tasks.preferences import Pair
from megatron_rl.trainer.run import Run
from megatron_rl.trainer.supervised import run_stage, train_stage, update_metrics


def reward_model(run: Run, resume: str) -> None:
    """The whole of the command: train, evaluate on held-out pairs, export."""
    run_stage(run, run.config.reward_model, lambda: _train(run), resume)


def _train(run: Run) -> None:
    config, pairs, actor = run.config.reward_model, run.pairs, run.learner.actor
    assert pairs is not None  # `build_run` has loaded them

    def learn(indices: Sequence[int], is_logged: bool) -> dict[str, float]:
        return preference_step(actor, [pairs.train[i] for i in indices], config.centering, is_logged)

    def evaluate(step: int) -> dict[str, float]:
        with run.timer.untimed("evaluate", "evaluating"):
            metrics = {}
            for task, held_out in pairs.eval.items():
                found = preference_metrics(actor, held_out, config.centering)
                metrics[f"eval/{task}/accuracy"] = found["reward_model/accuracy"]
                metrics[f"eval/{task}/margin"] = found["reward_model/margin"]
                metrics[f"eval/{task}/loss"] = found["reward_model/loss"]
            return metrics

    train_stage(run, "reward model", config, [pair.task for pair in pairs.train], learn, evaluate)


def pack_pairs(actor: Actor, pairs: Sequence[Pair]) -> list[MicroBatch]:
    """This data-parallel rank's share; both sides of a pair are in the same micro-batch, the chosen one first."""
    batch = TokenBatch.ends(ids for pair in pairs for ids in (pair.chosen, pair.rejected))
    shares = actor.shares([pair.num_tokens for pair in pairs], range(len(pairs)))[actor.grid.dp_rank]
    return [actor.pack(batch, [row for i in part for row in (2 * i, 2 * i + 1)], device.device()) for part in shares]


def preference_step(actor: Actor, pairs: Sequence[Pair], centering: float, is_logged: bool = True) -> dict[str, float]:
    """One optimizer step on the mean loss of all pairs. `is_logged`: else without the metrics that ranks have to add up."""
    micro_batches = pack_pairs(actor, pairs)

    def loss(number: int, scores: Tensor, entropy: Tensor | None) -> tuple[Tensor, Metrics]:
        losses, metrics = _losses(micro_batches[number], scores, pairs, centering)
        return losses.sum() / len(pairs), metrics

    result = actor.update(micro_batches, loss, temperature=1.0, with_metrics=is_logged)
    tokens = float(sum(pair.num_tokens for pair in pairs))
    return update_metrics(actor, result, is_logged) | {"reward_model/tokens": tokens}


def preference_metrics(actor: Actor, pairs: Sequence[Pair], centering: float) -> dict[str, float]:
    """Metrics of held-out pairs, without a step."""
    micro_batches = pack_pairs(actor, pairs)
    scores = actor.log_probs(micro_batches, temperature=1.0)  # on the last pipeline stage only
    scored = zip(micro_batches if actor.grid.is_last_stage else (), scores, strict=True)
    parts = [_losses(micro, values, pairs, centering)[1] for micro, (values, _) in scored]
    return actor.reduce(parts).values()


def _losses(micro: MicroBatch, scores: Tensor, pairs: Sequence[Pair], centering: float) -> tuple[Tensor, Metrics]:
    """Losses of a micro-batch's pairs, float32 [pairs], and metrics; `scores`: float32 [2 pairs]."""
    chosen, rejected = scores.view(-1, 2).unbind(1)
    margin = torch.tensor([pairs[row // 2].margin for row in micro.rows[::2]], device=scores.device)
    losses = bradley_terry_loss(chosen, rejected, margin, centering)
    every = torch.ones_like(losses, dtype=torch.bool)
    metrics = Metrics()
    metrics.mean("reward_model/loss", losses, every)
    metrics.mean("reward_model/accuracy", (chosen > rejected).float(), every)
    metrics.mean("reward_model/margin", chosen - rejected, every)
    metrics.mean("reward_model/chosen", chosen, every)
    metrics.mean("reward_model/rejected", rejected, every)
    return losses, metrics
