"""Ranks that are really built, with tensors that have content and processes that talk: what `plan --exact` is held to.

A case: a recipe, the `model`'s config.json, and `micro_batches`: how many each data-parallel rank trains on, whose passes
are tracked; 0: it is only built.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from megatron_rl.actor import actor as actor_module
from megatron_rl.actor.actor import Actor
from megatron_rl.actor.build import DTYPES
from megatron_rl.actor.optimizer_step import take_step
from megatron_rl.algorithms.metrics import Metrics
from megatron_rl.checkpoint.snapshot import Snapshotter
from megatron_rl.config.schema import Config
from megatron_rl.data.batch import TokenBatch
from megatron_rl.models import model_of
from megatron_rl.planning import exact
from megatron_rl.planning.dummy_inputs import Zeros
from megatron_rl.runtime import distributed
from megatron_rl.seams.megatron import Optimizer, routers
from megatron_rl.seams.torch_meta import StorageCounter


def hold(root: str, cases: list[tuple[Config, dict[str, Any]]]) -> None:
    """Every case on this rank; what it holds goes to a file of the rank's number."""
    from megatron.core import parallel_state

    held, before, grid = [], None, None
    for config, case in cases:
        if config.actor.parallel != before:
            parallel_state.destroy_model_parallel()
            before, grid = config.actor.parallel, distributed.initialize(config.actor.parallel, timeout_minutes=2)
        assert grid is not None
        held.append(_held(config, grid, case))
    assert grid is not None
    (Path(root) / f"{grid.rank}.json").write_text(json.dumps(held))
    distributed.shutdown()


def _held(config: Config, grid: distributed.ProcessGrid, case: dict[str, Any]) -> dict[str, int]:
    with StorageCounter(torch.device("cpu")) as memory:
        weights = Zeros(model_of(case["model"]), DTYPES[config.model.dtype], torch.device("cpu"))
        actor = Actor(config, grid, ".", weights, case["model"])
        actor.start_optimizer(config.actor.optimizer, total_steps=1)
        found = asdict(exact.state_of(actor))
        if count := case["micro_batches"]:
            for _, router in (router for chunk in actor.chunks for router in routers(chunk)):
                router.register_forward_hook(exact._evenly)
            found |= {"load_bytes": memory.peak - memory.now}
            found |= _tracked(config, actor, memory, count)
            snapshot = Snapshotter(grid, copied=True).take(actor.chunks, actor.optimizer)
            found["snapshot_bytes"] = snapshot.num_bytes
    return found


def _tracked(config: Config, actor: Actor, memory: StorageCounter, count: int) -> dict[str, int]:
    """Bytes that log-probs, and an update before its optimizer steps, take at the most beside the actor's state."""
    prompt, response = config.rollout.max_prompt_tokens, config.rollout.max_tokens
    sequences = count * actor.grid.dp * config.actor.tokens_per_microbatch // (prompt + response)
    words = np.random.default_rng(0).integers(0, 500, (sequences, prompt + response))
    batch = TokenBatch.continuations((row[:prompt], row[prompt:]) for row in words)
    peaks = list[int]()

    def stepped(optimizer: Optimizer, rate: float, number: int) -> float:
        peaks.append(memory.peak)
        return take_step(optimizer, rate, number)

    micro_batches = actor.micro_batches(batch)
    assert len(micro_batches) == count
    before = memory.restart()
    actor.log_probs(micro_batches, temperature=1.0)
    forward = memory.peak - before
    before = memory.restart()
    with mock.patch.object(actor_module, "take_step", stepped):
        actor.update(micro_batches, lambda number, log_probs, _: (-log_probs.mean(), Metrics()), temperature=1.0)
    return {"forward_bytes": forward, "update_bytes": peaks[0] - before}
