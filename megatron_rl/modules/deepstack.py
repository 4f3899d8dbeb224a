"""A decoder behind Qwen3-VL's vision tower, further outputs of which are added to what its first layers return
(DeepStack, Meng et al. 2024, arXiv:2406.04334)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from megatron_rl.data.images import PackedImages
from megatron_rl.models.family import ModelDescription, Vision
from megatron_rl.modules import vision as plain
from megatron_rl.seams.megatron import Chunk


@dataclass
class _SeenSequences(PackedSeqParams):
    """Packed sequences with what their micro-batch's images add to layers. It rides with the arguments that every layer is
    called with, because several micro-batches are under way at once, and layers are computed again in the backward pass."""

    slots: Tensor | None = None  # int64 [image tokens of this rank]: their places among its tokens
    added: tuple[Tensor, ...] = ()  # [image tokens of this rank, hidden] for each of the first layers


class DeepstackModel(plain.VisionLanguageModel):
    """`VisionLanguageModel` whose first layers add features of the tower to the image tokens that they return. All of these
    layers are on the first stage, in its first chunk."""

    def __init__(self, vision: Vision, *args: Any, **kwargs: Any) -> None:
        super().__init__(vision, *args, **kwargs)
        if self.pre_process:
            for level in range(vision.deepstack):
                layer: nn.Module = self.decoder.layers[level]
                layer.register_forward_hook(partial(_add, level), with_kwargs=True)

    def _tower(self, vision: Vision) -> nn.Module:
        config = Qwen3VLVisionConfig(**vision.tower)
        config._attn_implementation = "sdpa"
        tower: nn.Module = Qwen3VLVisionModel(config)
        return tower

    def _embed(self, embedded: Tensor, seen: Any, images: PackedImages, kwargs: dict[str, Any]) -> Tensor:
        embedded = super()._embed(embedded, seen, images, kwargs)
        slots, sources = images.slots, images.sources
        features = [each.to(embedded.dtype) for each in seen.deepstack_features]
        if self.config.sequence_parallel:  # this rank's part of the tokens; the sum over ranks is the tower's gradient
            features = [copy_to_tensor_model_parallel_region(each) for each in features]
            first = len(embedded) * self.pg_collection.tp.rank()
            mine = (slots >= first) & (slots < first + len(embedded))
            slots, sources = slots[mine] - first, sources[mine]
        features = [each[sources] for each in features]
        # Leaves: a layer that is computed again must not go on into the tower's graph, which all layers share.
        leaves = tuple(each.detach().requires_grad_(each.requires_grad) for each in features)
        packed = vars(kwargs["packed_seq_params"])
        kwargs["packed_seq_params"] = _SeenSequences(**packed, slots=slots, added=leaves)
        held: Tensor = _Rejoined.apply(embedded, leaves, *features)
        return held


class _Rejoined(torch.autograd.Function):
    """Hands gradients that `leaves` have collected on to what they were made of, when the gradient of the first layer's input
    is there: then all layers that read them are done."""

    @staticmethod
    def forward(ctx: Any, embedded: Tensor, leaves: tuple[Tensor, ...], *features: Tensor) -> Tensor:
        ctx.leaves = leaves
        return embedded.view_as(embedded)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        collected = tuple(leaf.grad for leaf in ctx.leaves)
        ctx.leaves = ()
        return (*gradients, None, *collected)


def _add(
    level: int, _: nn.Module, __: tuple[object, ...], kwargs: Mapping[str, Any], output: tuple[Tensor, object]
) -> tuple[Tensor, object] | None:
    """A layer's output [tokens, 1, hidden] with its level's features where images stand."""
    packed = kwargs["packed_seq_params"]
    if not isinstance(packed, _SeenSequences):
        return None
    hidden, context = output
    assert packed.slots is not None
    return hidden.index_add(0, packed.slots, packed.added[level][:, None]), context


def build(description: ModelDescription, config: TransformerConfig, vocab_size: int, vp_stage: int | None) -> Chunk:
    """One chunk of this rank's model, see `registry.Build`."""
    return plain.build(description, config, vocab_size, vp_stage, DeepstackModel)
