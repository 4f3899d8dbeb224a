"""Supervised fine-tuning: token cross-entropy on demonstrations, on the same actor that RL trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megatron_rl.actor.actor import Actor
from megatron_rl.algorithms.metrics import Metrics
from megatron_rl.data import Sample, TokenBatch
from megatron_rl.runtime.stop import StopRequested
from megatron_rl.tasks import make_order
from megatron_rl.tasks.prompts import refuse_long
from megatron_rl.tokenizer import Tokenizer
from megatron_rl.trainer.evaluate import evaluate
from megatron_rl.trainer.resume import load_checkpoint
from megatron_rl.trainer.run import Run


def sft(run: Run, resume: str) -> None:
    """The whole of `megatron-rl sft`: train, evaluate where the recipe has eval tasks, export."""
    config = run.config
    if not load_checkpoint(run, resume, config.sft.optimizer, config.sft.steps):
        run.learner.actor.start_optimizer(config.sft.optimizer, config.sft.steps)
    if run.state.step >= config.sft.steps:
        run.report.note(f"already at step {run.state.step} of {config.sft.steps}; to train on, raise sft.steps")
    _train(run)
    run.checkpoints.export()
    run.checkpoints.finish()


def warm_up(run: Run) -> None:
    """The SFT steps before RL, logged to `sft/metrics.jsonl`; from the first, or from a checkpoint that was loaded."""
    if not run.state.warming_up:
        run.learner.actor.start_optimizer(run.config.sft.optimizer, run.config.sft.steps)
        run.state = replace(run.state, warming_up=True)
    _train(run)
    run.checkpoints.end_warm_up()
    run.state = replace(run.state, warming_up=False)


def _train(run: Run) -> None:
    """The remaining steps. Where they are the whole run, not its warm-up, the last one has an evaluation."""
    config, prompts, warming_up = run.config.sft, run.sampler.prompts, run.state.warming_up
    samples = [sample for sample in prompts.train if sample.demonstration is not None]
    targets = demonstration_ids(
        samples, run.sampler.tokenizer, run.config.rollout.max_tokens, run.learner.actor.vocab_shard.vocab_size
    )
    tasks = [sample.task for sample in samples]
    weights = prompts.weights and {name: weight for name, weight in prompts.weights.items() if name in tasks}
    order = make_order(tasks, weights, run.config.seed)
    run.report.begin("SFT", run.state.stage_step, config.steps)
    for step in range(run.state.stage_step + 1, config.steps + 1):
        try:
            run.stop.check(run.grid)
        except StopRequested:
            run.checkpoints.save_before_end(run.state)
            raise
        run.timer.start(step)
        indices = order.take((step - 1) * config.batch_size, config.batch_size)
        batch = TokenBatch.continuations((samples[i].prompt_ids, targets[i]) for i in indices)
        with run.timer("update"):
            metrics = _step(run.learner.actor, batch)
        with run.timer("checkpoint"):
            snapshot = run.checkpoints.capture(step, config.steps, warming_up)
        metrics |= run.timer.take()
        metrics |= run.checkpoints.metrics()
        run.state = replace(run.state, warm_up=step) if warming_up else replace(run.state, step=step)
        if step == config.steps and prompts.eval and not warming_up:
            run.start_engine()
            metrics |= evaluate(run, step) | run.sampler.take_counters()
        if step % config.log_every == 0 or step == config.steps:
            run.report.log_sft(step, metrics)
        if snapshot is not None:
            run.checkpoints.submit(run.state, snapshot, metrics)


def _step(actor: Actor, batch: TokenBatch) -> dict[str, float]:
    num_tokens = sum(int(mask.sum()) for mask in batch.loss_mask.values())

    def loss(number: int, log_probs: Tensor, entropy: Tensor | None) -> tuple[Tensor, Metrics]:
        metrics = Metrics()
        metrics.mean("sft/loss", -log_probs, torch.ones_like(log_probs, dtype=torch.bool))
        return -log_probs.sum() / num_tokens, metrics

    result = actor.update(actor.micro_batches(batch), loss, temperature=1.0)
    return result.metrics.values() | {
        "actor/grad_norm": result.grad_norm,
        "actor/lr": result.learning_rate,
        "sft/tokens": float(num_tokens),
    }


def demonstration_ids(
    samples: Sequence[Sample], tokenizer: Tokenizer, max_tokens: int, vocab_size: int
) -> list[np.ndarray]:
    """Every demonstration's tokens followed by the end-of-sequence token, int64.

    Raises:
        ValueError: a demonstration is longer than a rollout may be, or it or its prompt has a token id outside the model's
            vocabulary.
    """
    texts = [sample.demonstration for sample in samples if sample.demonstration is not None]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    refuse_long(samples, [len(ids) + 1 for ids in encoded], max_tokens)
    for sample, ids in zip(samples, encoded, strict=True):
        highest = max([*sample.prompt_ids, *ids, end])
        if highest >= vocab_size:  # each tensor-parallel rank would take it for another rank's, and embed it as 0
            token = tokenizer.convert_ids_to_tokens(highest)
            raise ValueError(
                f"{sample.id} has token {token!r}, number {highest}, and the model only those below vocab_size = "
                f"{vocab_size}: resize its embedding (resize_token_embeddings of transformers), or use its "
                "own tokenizer"
            )
    return [np.asarray([*ids, end], dtype=np.int64) for ids in encoded]
