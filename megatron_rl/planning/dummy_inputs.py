"""Inputs of a model that is only counted: weights of zeros, and the largest micro-batch of a recipe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from megatron_rl.actor.actor import Actor
from megatron_rl.actor.packing import MicroBatch
from megatron_rl.config.schema import Config
from megatron_rl.data.batch import TokenBatch
from megatron_rl.data.images import PackedImages
from megatron_rl.models import Model
from megatron_rl.models.family import Vision
from megatron_rl.modules.vision import VisionLanguageModel
from megatron_rl.seams.megatron import Chunk
from megatron_rl.weights.files import MadeWeights


class Zeros(MadeWeights):
    """A model's tensors: what an actor loads here."""

    def __init__(self, model: Model, dtype: torch.dtype, where: torch.device) -> None:
        super().__init__(model, {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype], Path("(no folder)"))
        self._zeros = partial(torch.zeros, dtype=dtype, device=where)

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        shape = list(self.shape(name))
        shape[dim] = stop - start
        return self._zeros(shape)


def largest_micro_batch(config: Config, actor: Actor, tokens: int) -> MicroBatch:
    """`tokens` in sequences as long as the recipe allows, all of the responses' tokens scored; on the CPU."""
    prompt, response = config.rollout.max_prompt_tokens, config.rollout.max_tokens
    whole, rest = divmod(tokens, prompt + response)
    lengths = [prompt + response] * whole + [rest] * (rest > 1)
    prompts_ = [min(prompt, length - 1) for length in lengths]
    batch = TokenBatch.continuations(
        (np.zeros(first), np.zeros(length - first)) for first, length in zip(prompts_, lengths, strict=True)
    )
    micro = actor.pack(batch, range(len(lengths)), torch.device("cpu"))
    if actor.description.vision is not None:
        micro.images = _images(config, actor.model, actor.description.vision, prompts_)
    return micro


@dataclass(frozen=True)
class _Pictures:
    """Images of one prompt: as many numbers as its images have, all 0."""

    grids: np.ndarray
    numbers: int  # of a patch

    def pixels(self) -> np.ndarray:
        return np.zeros((int(self.grids.prod(axis=1).sum()), self.numbers), dtype=np.float32)


def _images(config: Config, model: Model, vision: Vision, prompts: Sequence[int]) -> PackedImages:
    """Makes for each prompt, of so many tokens, one image of the largest size that the recipe and the prompt allow."""
    side = vision.merge * model.dims["v_patch"]  # pixels of a token
    numbers = model.dims["v_channels"] * model.dims["v_frames"] * model.dims["v_patch"] ** 2
    pictures, count = [], 0
    for tokens in prompts:
        largest = tokens if config.model.max_pixels is None else min(tokens, config.model.max_pixels // side**2)
        rows = max(1, math.isqrt(largest))
        columns = max(1, largest // rows)
        grid = np.array([[1, rows * vision.merge, columns * vision.merge]], dtype=np.int64)
        pictures.append(_Pictures(grid, numbers))
        count += rows * columns
    slots = torch.arange(count)  # where they stand among the tokens is no matter
    return PackedImages(pictures, slots, slots)


def whole_windows(chunk: Chunk, config: Config, model: Model) -> None:
    """Makes a tower attend to whole images: one by one, its windows keep the same, and take ten times as long to count."""
    assert model.description.vision is not None
    side = model.description.vision.merge * model.dims["v_patch"]
    cast(VisionLanguageModel, chunk).tower.window_size = side * (math.isqrt(config.rollout.max_prompt_tokens) + 2)
