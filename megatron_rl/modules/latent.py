"""Multi-head latent attention of Megatron-Core's plain layers, whose projections to the latents are whole on every
tensor-parallel rank, as Transformer Engine's are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from torch import Tensor, nn

if TYPE_CHECKING:
    from megatron.core.transformer import MLATransformerConfig


class DuplicatedLinear(nn.Module):
    """A matrix [outputs, inputs] that every tensor-parallel rank has whole, and applies to its own tokens."""

    def __init__(self, config: MLATransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        # Ranks see different tokens with sequence parallelism: Megatron then sums the gradient over them.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


class LatentAttention(MLASelfAttention):
    """Megatron-Core's plain layers cut these two projections over ranks, and gather what they give out. The gradient of the
    part of a key that turns, which all heads read, would then be that of a rank's own heads alone."""

    def __init__(
        self, config: MLATransformerConfig, submodules: MLASelfAttentionSubmodules, *args: object, **options: object
    ) -> None:
        super().__init__(config, submodules, *args, **options)
        self.linear_q_down_proj = DuplicatedLinear(config, config.hidden_size, config.q_lora_rank)
        latent = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = DuplicatedLinear(config, config.hidden_size, latent)
