"""What one layout makes of one batch of preference pairs: run by every rank, saved by the first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from megatron_rl.actor.reward import RewardActor
from megatron_rl.checkpoint.convert import open_weights
from megatron_rl.config.actor import OptimizerConfig, ParallelConfig
from megatron_rl.config.schema import Config
from megatron_rl.tasks.preferences import Pair
from megatron_rl.trainer.reward_model import preference_metrics, preference_step
from megatron_rl.weights.export import export_hf

from .layouts import Layout

RATE, EPS = (
    1e4,
    100.0,
)  # so large an eps that a weight changes by RATE / (EPS + |gradient|) of its gradient: see `layouts`
ADAM = OptimizerConfig(lr=RATE, eps=EPS, weight_decay=0.0, clip_grad=1e9)
CENTERING = 0.05


def make_pairs(count: int = 12) -> list[Pair]:
    """Random pairs of very different lengths, with margins of both signs; the prompt is the same on both sides."""
    rng = np.random.default_rng(3)
    pairs = []
    for _ in range(count):
        prompt = rng.integers(2, 61, size=rng.integers(2, 10)).tolist()
        sides = [prompt + rng.integers(2, 61, size=rng.integers(1, 30)).tolist() for _ in range(2)]
        pairs.append(Pair("pairs", *sides, margin=float(rng.normal())))
    return pairs


def run_layouts(root: str, layouts: list[Layout]) -> None:
    """One rank of every layout in turn."""
    from megatron.core import parallel_state

    from megatron_rl.runtime import distributed

    for layout in layouts:
        config = Config(run_dir=str(Path(root) / "run"), seed=7)
        config.model.dtype = layout.dtype
        config.actor.parallel = ParallelConfig(
            tensor=layout.tensor,
            pipeline=layout.pipeline,
            context=layout.context,
            sequence=layout.sequence,
            expert=layout.expert,
        )
        config.actor.optimizer = OptimizerConfig(**{**vars(ADAM), "distributed": layout.distributed})
        config.actor.tokens_per_microbatch = layout.tokens_per_microbatch
        grid = distributed.initialize(config.actor.parallel, timeout_minutes=2)
        folder = Path(root) / layout.model
        actor = RewardActor(config, grid, folder, open_weights(folder))
        if layout.name.startswith("alone"):
            export_hf(folder / "reward", actor.chunks, actor.family, actor.hf_config, actor.parallel, folder)
        before = {name: tensor.clone() for name, tensor in actor.iter_hf_weights()}
        actor.start_optimizer(config.actor.optimizer, 2)
        held_out = preference_metrics(actor, make_pairs(), CENTERING)
        metrics = preference_step(actor, make_pairs(), CENTERING)
        changes = {name: before[name] - tensor for name, tensor in actor.iter_hf_weights()}
        parallel_state.destroy_model_parallel()
        if grid.is_main:
            result = {"held_out": held_out, "metrics": metrics, "changes": changes}
            torch.save(result, Path(root) / f"{layout.name}.pt")
