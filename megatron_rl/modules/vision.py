"""A decoder behind a vision tower: Megatron-Core's `GPTModel`, and in front of its first layer transformers' tower."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from megatron_rl.data.images import PackedImages
from megatron_rl.models.family import ModelDescription, Vision
from megatron_rl.modules import gpt
from megatron_rl.seams.megatron import Chunk


class VisionLanguageModel(GPTModel):
    """`GPTModel` in which image tokens have the tower's outputs for embeddings. The first stage has the tower, every
    tensor-parallel rank all of it."""

    visual: Any  # the tower, by the family's `Vision.module`

    def __init__(self, vision: Vision, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, scatter_embedding_sequence_parallel=False)
        if self.pre_process:
            self.visual = self._tower(vision).to(self.config.params_dtype)
            if self.config.recompute_granularity is not None:  # each of its blocks; nothing in them is random
                self.visual.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})

    @property
    def tower(self) -> Any:
        return self.visual

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        images: PackedImages | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """As `GPTModel`'s. `position_ids`: [1, tokens], or [3, 1, tokens] by time, height and width."""
        if position_ids.dim() == 2:
            position_ids = position_ids.expand(3, *position_ids.shape)
        embedded: Tensor | None = None
        if self.pre_process:
            embedded = self.embedding(input_ids=input_ids, position_ids=None)  # [tokens, 1, hidden]
            if images is not None:
                embedded = self._embed(embedded, self._see(images), images, kwargs)
            elif torch.is_grad_enabled():
                # Gradients that are summed while others are computed wait for every trained parameter's.
                trained = (weight for weight in self.visual.parameters() if weight.requires_grad)
                embedded = embedded + 0 * sum(weight.flatten()[0] for weight in trained)
            if images is None and self.config.sequence_parallel:
                embedded = scatter_to_sequence_parallel_region(embedded)
        output: Tensor = super().forward(input_ids, position_ids, attention_mask, decoder_input=embedded, **kwargs)
        return output

    def _embed(self, embedded: Tensor, seen: Any, images: PackedImages, kwargs: dict[str, Any]) -> Tensor:
        """The first layer's input: `embedded` with the tower's outputs where images stand, this rank's part of it. `kwargs`
        are what the decoder is called with."""
        outputs = seen.pooler_output.to(embedded.dtype)
        embedded = embedded.index_copy(0, images.slots, outputs[images.sources, None])
        return scatter_to_sequence_parallel_region(embedded) if self.config.sequence_parallel else embedded

    def _see(self, images: PackedImages) -> Any:
        """The tower's outputs as transformers returns them, `pooler_output`: [image tokens of all prompts, hidden]."""
        device, rope = images.slots.device, self.visual.rotary_pos_emb
        rope.inv_freq = rope.compute_axial_rope_parameters(rope.config, device)[
            0
        ]  # fp32: a model's dtype rounds buffers
        where = self.visual.patch_embed.proj.weight.device
        pixels = torch.cat([torch.as_tensor(prompt.pixels(), device=where) for prompt in images.prompts])
        grids = torch.cat([torch.as_tensor(prompt.grids, device=device) for prompt in images.prompts])
        return self.visual(pixels, grids)

    def _tower(self, vision: Vision) -> nn.Module:
        config = Qwen2_5_VLVisionConfig(**vision.tower)
        config._attn_implementation = "sdpa"
        tower: Any = Qwen2_5_VisionTransformerPretrainedModel(config)
        for block in tower.blocks:
            block.mlp = _GatedMLP(config.hidden_size, config.intermediate_size)
        result: nn.Module = tower
        return result


class _GatedMLP(nn.Module):
    """The tower's feed-forward with gate and up projection in one, as vLLM has them."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(hidden, 2 * ffn), nn.Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


def build(
    description: ModelDescription,
    config: TransformerConfig,
    vocab_size: int,
    vp_stage: int | None,
    model: type[VisionLanguageModel] = VisionLanguageModel,
) -> Chunk:
    """One chunk of this rank's model, see `registry.Build`; `model`: its class."""
    assert description.vision is not None
    config.mrope_section = list(description.vision.sections)
    config.apply_rope_fusion = False  # Transformer Engine's takes a packed sequence's positions to begin at 0
    return gpt.build(description, config, vocab_size, vp_stage, partial(model, description.vision))
