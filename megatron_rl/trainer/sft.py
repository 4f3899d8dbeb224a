"""Supervised fine-tuning: token cross-entropy on demonstrations, on the same actor that RL trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from megatron_rl.actor.actor import Actor
from megatron_rl.agents.demonstrated import conversation_ids
from megatron_rl.agents.rendering import Renderer
from megatron_rl.algorithms.metrics import Metrics
from megatron_rl.base.messages import errors_named
from megatron_rl.config.schema import Config
from megatron_rl.data.batch import TokenBatch
from megatron_rl.data.images import PromptImages
from megatron_rl.data.sample import Sample
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.tasks.loading import refuse_long
from megatron_rl.tasks.tokenizing import template_params
from megatron_rl.trainer.evaluate import evaluate
from megatron_rl.trainer.run import Run
from megatron_rl.trainer.supervised import run_stage, train_stage, update_metrics


class Example(NamedTuple):
    """A prompt and its demonstration."""

    prompt_ids: Sequence[int]
    ids: np.ndarray  # int64 [tokens], of what follows, the demonstration's end included
    learned: np.ndarray  # bool [tokens], which of them are the policy's
    images: PromptImages | None


def sft(run: Run, resume: str) -> None:
    """The whole of `megatron-rl sft`: train, evaluate where the recipe has eval tasks, export."""
    run_stage(run, run.config.sft, lambda: _train(run), resume)


def warm_up(run: Run) -> None:
    """The SFT steps before RL, logged to `sft/metrics.jsonl`; from the first, or from a checkpoint that was loaded."""
    if not run.state.warming_up:
        run.learner.actor.start_optimizer(run.config.sft.optimizer, run.config.sft.steps)
        run.state = replace(run.state, warming_up=True)
    _train(run)
    run.checkpoints.end_warm_up()
    run.state = replace(run.state, warming_up=False)


def _train(run: Run) -> None:
    """The remaining steps. Where they are the whole run, not its warm-up, there are evaluations."""
    actor, prompts = run.learner.actor, run.sampler.prompts
    samples = [sample for sample in prompts.train if sample.demonstration is not None]
    examples = _examples(run, samples)
    held_out = {
        task: _examples(run, own)
        for task, own in prompts.eval.items()
        if not run.state.warming_up and own and all(sample.demonstration is not None for sample in own)
    }

    def learn(indices: Sequence[int], is_logged: bool) -> dict[str, float]:
        return _step(actor, _batch([examples[i] for i in indices]), is_logged)

    def evaluated(step: int) -> dict[str, float]:
        return _held_out_loss(run, held_out) | (_generate(run, step) if prompts.eval else {})

    train_stage(run, "SFT", run.config.sft, [sample.task for sample in samples], learn, evaluated)


def _examples(run: Run, samples: Sequence[Sample]) -> list[Example]:
    vocab_size = run.learner.actor.vocab_shard.vocab_size
    targets = demonstration_ids(samples, run.sampler.tokenizer, run.config, vocab_size)
    return [Example(sample.prompt_ids, *target, sample.images) for sample, target in zip(samples, targets, strict=True)]


def _batch(examples: Sequence[Example]) -> TokenBatch:
    batch = TokenBatch.continuations(((one.prompt_ids, one.ids) for one in examples), [one.images for one in examples])
    for row, one in enumerate(examples):
        batch.loss_mask[row][len(one.prompt_ids) :] = one.learned
    return batch


def _step(actor: Actor, batch: TokenBatch, is_logged: bool) -> dict[str, float]:
    num_tokens = sum(int(mask.sum()) for mask in batch.loss_mask.values())

    def loss(number: int, log_probs: Tensor, entropy: Tensor | None) -> tuple[Tensor, Metrics]:
        return -log_probs.sum() / num_tokens, _cross_entropy(log_probs)

    result = actor.update(actor.micro_batches(batch), loss, temperature=1.0, with_metrics=is_logged)
    return update_metrics(actor, result, is_logged) | {"sft/tokens": float(num_tokens)}


def _cross_entropy(log_probs: Tensor) -> Metrics:
    metrics = Metrics()
    metrics.mean("sft/loss", -log_probs, torch.ones_like(log_probs, dtype=torch.bool))
    return metrics


def _held_out_loss(run: Run, held_out: Mapping[str, Sequence[Example]]) -> dict[str, float]:
    """Mean cross-entropy per token of the eval tasks' demonstrations."""
    actor, metrics = run.learner.actor, {}
    for task, examples in held_out.items():
        with run.timer.untimed("evaluate", f"loss on {task}"):
            scored = actor.log_probs(actor.micro_batches(_batch(examples)), temperature=1.0)
            found = actor.reduce([_cross_entropy(log_probs) for log_probs, _ in scored]).values()
        metrics[f"eval/{task}/loss"] = found["sft/loss"]
    return metrics


def _generate(run: Run, step: int) -> dict[str, float]:
    """Responses of the engine with the present weights; the device is the actor's again where steps follow."""
    if run.sampler.has_engine:
        scored = run.score_by_actor()
        run.hand_device_to_engine()
        run.sync.check(scored)
    else:
        run.start_engine()
    steps = run.config.sft.steps
    metrics = evaluate(run.sampler, run.report, step, steps) | run.sampler.take_counters()
    if step < steps:
        run.hand_device_to_actor()
    return metrics


def demonstration_ids(
    samples: Sequence[Sample], tokenizer: Tokenizer, config: Config, vocab_size: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Every demonstration's tokens, int64, and which of them the policy writes, bool: a response's text and the
    end-of-sequence token, all of them; of a conversation the assistant's turns, each with that token.

    Raises:
        ValueError: a demonstration is longer than a rollout may be, or it or its prompt has a token id outside the model's
            vocabulary; a conversation of a task without a chat template.
    """
    targets = _of_texts(samples, tokenizer) | _of_conversations(samples, tokenizer, config)
    refuse_long(samples, [len(targets[sample.id][0]) for sample in samples], config.rollout.max_tokens)
    for sample in samples:
        highest = max([*sample.prompt_ids, *targets[sample.id][0].tolist()])
        if highest >= vocab_size:  # each tensor-parallel rank would take it for another rank's, and embed it as 0
            token = tokenizer.convert_ids_to_tokens(highest)
            raise ValueError(
                f"{sample.id} has token {token!r}, number {highest}, and the model only those below vocab_size = "
                f"{vocab_size}: resize its embedding (resize_token_embeddings of transformers), or use its "
                "own tokenizer"
            )
    return [targets[sample.id] for sample in samples]


Targets: TypeAlias = dict[str, tuple[np.ndarray, np.ndarray]]  # by sample id


def _of_texts(samples: Sequence[Sample], tokenizer: Tokenizer) -> Targets:
    texts = {sample.id: sample.demonstration for sample in samples if isinstance(sample.demonstration, str)}
    if not texts:
        return {}  # a tokenizer makes one text of none
    encoded, end = tokenizer(list(texts.values()), add_special_tokens=False)["input_ids"], tokenizer.eos_token_id
    return {
        name: (np.asarray([*ids, end], dtype=np.int64), np.ones(len(ids) + 1, dtype=bool))
        for name, ids in zip(texts, encoded, strict=True)
    }


def _of_conversations(samples: Sequence[Sample], tokenizer: Tokenizer, config: Config) -> Targets:
    tasks, targets = config.tasks.train | config.tasks.eval, Targets()
    for sample in samples:
        if isinstance(sample.demonstration, list):
            task = tasks[sample.task]
            with errors_named(f"demonstration of {sample.id}"):
                if task.agent is not None and task.agent.history == "rendered":
                    raise ValueError(
                        f"it is one sequence, and a rollout of `{sample.task}` begins another where the chat template "
                        "rewrites an earlier turn; set the task's `agent.history` to kept"
                    )
                parser = task.agent.parser if task.agent is not None else "none"
                renderer = Renderer(tokenizer, template_params(task))
                targets[sample.id] = conversation_ids(renderer, sample, sample.demonstration, parser)
    return targets
