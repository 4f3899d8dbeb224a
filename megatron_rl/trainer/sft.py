"""Supervised fine-tuning: token cross-entropy on demonstrations, on the same actor that RL trains."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.metrics import Metrics
from megatron_rl.data import Sample, TokenBatch
from megatron_rl.runtime.stop import StopRequested
from megatron_rl.tasks import make_order
from megatron_rl.trainer.checkpointing import (
    capture,
    end_warm_up,
    export,
    finish_saves,
    save_before_end,
    save_metrics,
    submit,
)
from megatron_rl.trainer.context import Run
from megatron_rl.trainer.evaluate import evaluate
from megatron_rl.trainer.prompts import refuse_long
from megatron_rl.trainer.resume import load_checkpoint


def sft(run: Run, resume: str) -> None:
    """The whole of `megatron-rl sft`: train, evaluate where the recipe has eval tasks, export."""
    config = run.config
    if not load_checkpoint(run, resume, config.sft.optimizer, config.sft.steps):
        run.actor.start_optimizer(config.sft.optimizer, config.sft.steps)
    if run.state.step >= config.sft.steps:
        run.report.note(f"all {config.sft.steps} steps were done before; to train on, raise sft.steps")
    _train(run)
    export(run)
    finish_saves(run)


def supervise(run: Run) -> None:
    """The warm-up before RL: `sft.steps` optimizer steps, logged to `sft/metrics.jsonl`; it begins, or goes on after the
    checkpoint that `load_checkpoint` has found."""
    if not run.warming_up:
        run.actor.start_optimizer(run.config.sft.optimizer, run.config.sft.steps)
        run.warming_up = True
    _train(run)
    end_warm_up(run)


def _train(run: Run) -> None:
    """The steps that are left. Where they are all of the run, and not its warm-up, the last one has an evaluation."""
    config = run.config.sft
    samples = [sample for sample in run.train_samples if sample.demonstration is not None]
    targets = demonstration_ids(run, samples)
    tasks = [sample.task for sample in samples]
    weights = run.task_weights and {name: weight for name, weight in run.task_weights.items() if name in tasks}
    order = make_order(tasks, weights, run.config.seed)
    run.report.begin("SFT", run.step, config.steps)
    for step in range(run.step + 1, config.steps + 1):
        try:
            run.stop.check(run.grid)
        except StopRequested:
            save_before_end(run)
            raise
        run.phases.start(step)
        indices = order.take((step - 1) * config.batch_size, config.batch_size)
        with run.phases("update"):
            metrics = _step(run, [samples[i].prompt_ids for i in indices], [targets[i] for i in indices])
        with run.phases("checkpoint"):
            snapshot = capture(run, step, config.steps)
        metrics |= run.phases.take()
        metrics |= save_metrics(run)
        if run.warming_up:
            run.state.warm_up = step
        else:
            run.state.step = step
            if step == config.steps and run.eval_samples:
                run.start_engine()
                metrics |= evaluate(run, step) | run.take_counters()
        if step % config.log_every == 0 or step == config.steps:
            run.report.log_sft(step, metrics)
        if snapshot is not None:
            submit(run, snapshot, metrics)


def _step(run: Run, prompt_ids: Sequence[list[int]], targets: Sequence[np.ndarray]) -> dict[str, float]:
    num_tokens = sum(len(target) for target in targets)

    def loss(number: int, log_probs: Tensor, entropy: Tensor | None) -> tuple[Tensor, Metrics]:
        metrics = Metrics()
        metrics.mean("sft/loss", -log_probs, torch.ones_like(log_probs, dtype=torch.bool))
        return -log_probs.sum() / num_tokens, metrics

    micro_batches = run.actor.micro_batches(TokenBatch.continuations(zip(prompt_ids, targets, strict=True)))
    result = run.actor.update(micro_batches, loss, temperature=1.0)
    return result.metrics.values() | {
        "actor/grad_norm": result.grad_norm,
        "actor/lr": result.learning_rate,
        "sft/tokens": float(num_tokens),
    }


def demonstration_ids(run: Run, samples: Sequence[Sample]) -> list[np.ndarray]:
    """Every demonstration's tokens with the end-of-sequence token behind them, int64.

    Raises:
        ValueError: where a demonstration is longer than what the model may write in a rollout, or the tokenizer has tokens in
            it or in its prompt that the model has not.
    """
    limit, end = run.config.rollout.max_tokens, run.tokenizer.eos_token_id
    encoded = run.tokenizer([sample.demonstration for sample in samples], add_special_tokens=False)["input_ids"]
    refuse_long(samples, [len(ids) + 1 for ids in encoded], limit)
    vocab = run.actor.vocab_shard.vocab_size
    for sample, ids in zip(samples, encoded, strict=True):
        highest = max([*sample.prompt_ids, *ids, end])
        if highest >= vocab:  # tensor-parallel ranks would take it for another rank's, and it for 0
            token = run.tokenizer.convert_ids_to_tokens(highest)
            raise ValueError(
                f"{sample.id} has token {token!r}, number {highest}, and the model only those below vocab_size = {vocab}: "
                "resize its embedding (resize_token_embeddings of transformers), or use the tokenizer that belongs to it"
            )
    return [np.asarray([*ids, end], dtype=np.int64) for ids in encoded]
