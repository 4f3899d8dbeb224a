"""One training step of the real actor for every combination of methods: run by every rank, saved by the first."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from megatron_rl.actor.actor import Actor
from megatron_rl.actor.packing import MicroBatch
from megatron_rl.actor.update_result import LossFunction
from megatron_rl.algorithms import (
    Algorithm,
    Denominators,
    Metrics,
    RewardTable,
    list_advantage_estimators,
    list_surrogates,
    make_algorithm,
)
from megatron_rl.config.actor import OptimizerConfig
from megatron_rl.config.algorithm import Aggregation, Ratio
from megatron_rl.config.model import CreateModelConfig
from megatron_rl.config.schema import Config
from megatron_rl.data.batch import TokenBatch

from .layouts import in_parts

SHAPE = CreateModelConfig(
    layers=1,
    hidden_size=16,
    heads=2,
    kv_heads=1,
    head_dim=8,
    ffn_size=16,
    vocab_size=32,
    tie_embeddings=True,
    init_std=0.3,
)
GROUPS, GROUP_SIZE, LONGEST = 3, 3, 6
PARTED = (1, 3, 4, 7, 8)  # rollouts of several sequences
LOSSES = list(itertools.product(list_surrogates(), get_args(Aggregation), get_args(Ratio)))
# Every loss, with changing estimators; every estimator with every weight (it may bring bounds of its own), with changing
# rest. The loss alone goes through all of them in tests/algorithms/test_loss.py.
COMBINATIONS = [
    (estimator, *loss) for estimator, loss in zip(itertools.cycle(list_advantage_estimators()), LOSSES, strict=False)
]
COMBINATIONS += [
    (estimator, *loss)
    for index, estimator in enumerate(list_advantage_estimators())
    for loss in LOSSES[index :: len(LOSSES) // len(list_surrogates())]
    if (estimator, *loss) not in COMBINATIONS
]
# Every choice at least once.
SOME = COMBINATIONS[::9]


def make_rollouts() -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Prompts, responses, and how far each token's old log-prob lies below the current one: ratios from 0.3 to 3."""
    rng = np.random.default_rng(3)
    count = GROUPS * GROUP_SIZE
    prompts = [rng.integers(2, 32, size=2 + i % 2) for i in range(count)]
    responses = [rng.integers(2, 32, size=1 + (5 * i) % LONGEST) for i in range(count)]
    return prompts, responses, [rng.normal(0, 0.5, size=len(each)) for each in responses]


def make_table(responses: list[np.ndarray]) -> RewardTable:
    rng = np.random.default_rng(4)
    return RewardTable(
        torch.from_numpy(rng.random((GROUPS, GROUP_SIZE, 3))),
        ("right", "format", "judge"),
        weights={"format": 0.5},
        lengths=torch.tensor([len(each) for each in responses]).view(GROUPS, GROUP_SIZE),
        greedy=torch.from_numpy(rng.random((GROUPS, 3))),
    )


def algorithm_of(estimator: str, weight: str, aggregation: str, ratio: str) -> Algorithm:
    section = {
        "estimator": {"name": estimator},
        "surrogate": {"name": weight},
        "aggregation": aggregation,
        "ratio": ratio,
    }
    return make_algorithm(section, max_tokens=LONGEST)


def run_steps(root: str, name: str, combinations: list[tuple[str, str, str, str]], with_jacobian: bool) -> None:
    """Saves `<name>.pt`: per combination gradient norm, metrics and variance; and what checks need."""
    from megatron.core import parallel_state

    from megatron_rl.runtime import distributed

    config = Config(run_dir=str(Path(root) / "run"))
    config.model.dtype = "float32"
    # A step too small to change any weight: all combinations see the same model, and the gradient is what is compared.
    config.actor.optimizer = OptimizerConfig(lr=1e-30, clip_grad=0.0)
    config.actor.tokens_per_microbatch = 24
    grid = distributed.initialize(config.actor.parallel, timeout_minutes=2)
    actor = Actor(config, grid, Path(root) / "model")
    actor.start_optimizer(config.actor.optimizer, 1)
    prompts, responses, shifts = make_rollouts()
    table = make_table(responses)
    batch = in_parts([*zip(prompts, responses, strict=True)], PARTED)
    micro_batches = actor.micro_batches(batch)
    current = [log_probs for log_probs, _ in actor.log_probs(micro_batches, 1.0)]
    old = [log_probs - micro.concatenate(shifts) for micro, log_probs in zip(micro_batches, current, strict=True)]
    saved: dict[str, Any] = {"steps": {}}
    for combination in combinations:
        algorithm = algorithm_of(*combination)
        estimate = algorithm.compute_advantages(table)
        advantages = estimate.advantages.flatten().numpy().astype(np.float32)
        whole = Denominators(sum(map(len, responses)), len(responses))
        loss = make_loss(algorithm, micro_batches, old, advantages, estimate.clip_range, whole)
        result = actor.update(micro_batches, loss, 1.0, part_size=part_size(combination[2]))
        saved["steps"][combination] = {
            "advantages": advantages,
            "clip_range": estimate.clip_range,
            "grad_norm": result.grad_norm,
            "metrics": result.metrics.values(),
            "variance": result.gradient_variance,
            "parts": result.gradient_parts,
        }
    if with_jacobian:
        saved["rows"] = [micro.rows for micro in micro_batches]
        saved["jacobian"] = jacobian(actor, micro_batches)
        saved["log_probs"] = torch.cat(current)
        saved["alone"] = one_by_one(actor, batch, saved["rows"])
    if grid.is_main:
        torch.save(saved, Path(root) / f"{name}.pt")
    parallel_state.destroy_model_parallel()


def one_by_one(actor: Actor, batch: TokenBatch, rows: list[list[int]]) -> Tensor:
    """Log-probs of the scored tokens of these entries, each of their sequences by itself in a micro-batch."""
    found = []
    for row in itertools.chain(*rows):
        ends = np.cumsum(batch.sequence_lengths.get(row, [batch.lengths[row]]))[:-1]
        for tokens, mask in zip(np.split(batch.tokens[row], ends), np.split(batch.loss_mask[row], ends), strict=True):
            single = actor.micro_batches(TokenBatch([len(tokens)], {0: tokens}, {0: mask}))
            found += [log_probs for log_probs, _ in actor.log_probs(single, 1.0)]
    return torch.cat(found)


def part_size(aggregation: str) -> Callable[[MicroBatch], float]:
    if aggregation == "token-mean":
        return lambda micro: float(micro.targets.numel())
    return lambda micro: float(len(micro.rows))


def make_loss(
    algorithm: Algorithm,
    micro_batches: list[MicroBatch],
    old: list[Tensor],
    advantages: np.ndarray,
    clip_range: tuple[float, float] | None,
    whole: Denominators,
) -> LossFunction:
    def loss(number: int, log_probs: Tensor, entropy: Tensor | None) -> tuple[Tensor, Metrics]:
        micro = micro_batches[number]
        return algorithm.policy_loss(
            log_probs,
            old[number],
            None,
            None,
            None,
            torch.as_tensor(advantages[micro.rows], dtype=torch.float32)[micro.sequence_ids],
            torch.ones_like(micro.targets, dtype=torch.bool),
            sequence_ids=micro.sequence_ids,
            denominators=whole,
            clip_range=clip_range,
        )

    return loss


def jacobian(actor: Actor, micro_batches: list[MicroBatch]) -> Tensor:
    """d log-prob of each token / d parameters, [tokens, parameters]; tokens in the micro-batches' order."""
    rows = []
    for micro in micro_batches:
        for token in range(len(micro.targets)):

            def one(_: int, log_probs: Tensor, entropy: Tensor | None, token: int = token) -> tuple[Tensor, Metrics]:
                return log_probs[token], Metrics()

            actor.update([micro], one, 1.0)
            gradients = [p.main_grad.flatten() for chunk in actor.ddp_chunks for p in chunk.parameters()]
            rows.append(torch.cat(gradients).clone())
    return torch.stack(rows)
