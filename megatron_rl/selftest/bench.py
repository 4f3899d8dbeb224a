"""Shared by the steps: small models, a recipe, sequences, and the two ways to run an actor on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_rl.actor.actor import Actor
from megatron_rl.algorithms.metrics import Metrics
from megatron_rl.checkpoint.convert import open_weights
from megatron_rl.config import Config, Machine, check, load_recipe
from megatron_rl.config.actor import ParallelConfig
from megatron_rl.config.machine import count_gpus
from megatron_rl.config.model import CreateModelConfig
from megatron_rl.data.batch import TokenBatch
from megatron_rl.models import read_hf_config
from megatron_rl.models.registry import created_config
from megatron_rl.runtime import device, distributed
from megatron_rl.runtime.distributed import ProcessGrid
from megatron_rl.weights.create import create_model, random_weights, write_tokenizer
from megatron_rl.weights.files import save_tensors

Figures = dict[str, float | str]

# Sizes that FP8 takes; weights that are far enough from zero for attention not to be uniform.
SHAPE = CreateModelConfig(hidden_size=256, heads=4, kv_heads=2, head_dim=64, ffn_size=512, init_std=0.08)
RECIPE = """
seed: 0
tasks:
  train:
    chain_sum:
      source: reasoning_gym
      name: chain_sum
      params: {min_terms: 4, max_terms: 6, min_digits: 1, max_digits: 1}
      prompt: "{expression:compact}="
      size: 256
      demonstrations: chain_sum_steps
rewards:
  correct: {reward: puzzle, params: {after: "#", partial: false}}
  length: {reward: format, params: {pattern: "[0-9]*"}}  # a model that knows nothing gets this one now and then
rollout: {group_size: 4, max_prompt_tokens: 16, max_tokens: 56, cpu_cache_gib: 0.25, memory_fraction: 0.5}
actor: {optimizer: {lr: 1.0e-3}}
sft: {steps: 3, batch_size: 16, log_every: 1, optimizer: {lr: 1.0e-3}}
trainer: {steps: 3, prompts_per_step: 8, eval_every: 0}
checkpoint: {every: 0, export: false}
"""


class Surprise(Exception):
    """A step's figures are not what they must be; the message has both."""


@dataclass
class Bench:
    """One step's place: a folder of its own, its ranks, and its overrides."""

    folder: Path
    tensor: int = 1  # tensor parallelism of actor and engine
    overrides: tuple[str, ...] = ()
    minutes: float = 15.0  # that a rank may wait for another, which may be compiling

    @property
    def gpu(self) -> bool:
        return device.has_gpu()

    @property
    def dtype(self) -> str:
        """bf16 on GPUs, as everybody runs; on a CPU what shows the smallest fault."""
        return "bfloat16" if self.gpu else "float32"

    @cached_property
    def grid(self) -> ProcessGrid:
        parallel = ParallelConfig(tensor=self.tensor, sequence=self.tensor > 1)
        return distributed.initialize(parallel, timeout_minutes=self.minutes, engine_ranks=self.tensor)

    def model(self, shape: CreateModelConfig, experts: int = 0, weights: bool = True) -> Path:
        """A model folder, random, as `created_config` describes it."""
        import transformers

        folder = self.folder / f"model_{experts}"
        if self.grid.is_main and shape.vision is not None:
            create_model(folder, shape, seed=0)
        elif self.grid.is_main:
            folder.mkdir(parents=True)
            transformers.AutoConfig.for_model(**created_config(shape, experts)).save_pretrained(folder)
            write_tokenizer(folder, shape)
            if weights:
                save_tensors(folder / "model.safetensors", random_weights(folder, shape.init_std, seed=0))
        self.grid.barrier()
        return folder

    def recipe(self, model: Path, name: str, *overrides: str) -> Config:
        """The steps' recipe for this model, its run folder `name` in the step's."""
        path = self.folder / "recipe.yaml"
        if self.grid.is_main:
            (self.folder / name).mkdir()
            path.write_text(RECIPE, encoding="utf-8")
        self.grid.barrier()
        overrides_ = [f"run_dir={self.folder / name}", f"model.path={model}", f"model.dtype={self.dtype}"]
        overrides_ += [f"actor.parallel.tensor={self.tensor}", f"rollout.tensor_parallel={self.tensor}"]
        overrides_ += [f"actor.parallel.sequence={str(self.tensor > 1).lower()}"]
        world = self.grid.world
        machine = Machine(gpus=count_gpus(), world_size=world, local_world_size=world)
        return check(
            load_recipe(path, [*overrides_, *self.overrides, *overrides]), machine=machine, model=read_hf_config(model)
        )

    def actor(self, config: Config) -> Actor:
        folder = Path(str(config.model.path))
        return Actor(config, self.grid, folder, open_weights(folder))


def sequences(vocab: int, lengths: Sequence[int] = (37, 129, 61, 203)) -> list[np.ndarray]:
    """Random tokens; lengths that are multiples of nothing."""
    generator = np.random.default_rng(0)
    return [generator.integers(2, vocab, length) for length in lengths]


def scores(actor: Actor, tokens: Sequence[np.ndarray]) -> Tensor:
    """Log-probs of all tokens but the first of each sequence, in their order; float32 on the host."""
    micro_batches = actor.micro_batches(TokenBatch.continuations((ids[:1], ids[1:]) for ids in tokens))
    found: dict[int, Tensor] = {}
    for micro, (log_probs, _) in zip(micro_batches, actor.log_probs(micro_batches, 1.0), strict=True):
        for local, row in enumerate(micro.rows):
            found[row] = log_probs[micro.sequence_ids == local].float().cpu()
    return torch.cat([found[row] for row in range(len(tokens))])


def update(actor: Actor, tokens: Sequence[np.ndarray]) -> float:
    """One optimizer step towards these sequences; the gradient norm."""
    micro_batches = actor.micro_batches(TokenBatch.continuations((ids[:1], ids[1:]) for ids in tokens))
    count = sum(len(ids) - 1 for ids in tokens)

    def loss(number: int, log_probs: Tensor, entropy: Tensor | None) -> tuple[Tensor, Metrics]:
        return -log_probs.sum() / count, Metrics()

    return actor.update(micro_batches, loss, temperature=1.0).grad_norm


def weights(actor: Actor) -> dict[str, Tensor]:
    """A copy on the host, float32, by Hugging Face name."""
    return {name: tensor.float().to("cpu", copy=True) for name, tensor in actor.iter_hf_weights()}


def expect(name: str, value: float, at_most: float, what: str) -> float:
    """Raises Surprise: `value` is above, or not a number."""
    if not value <= at_most:
        raise Surprise(f"{name} is {value:.3g}, and {at_most:g} is the most that {what}")
    return value
