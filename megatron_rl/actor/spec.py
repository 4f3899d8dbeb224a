"""The transformer layer: Transformer Engine's modules where it is installed, Megatron-Core's plain ones elsewhere.

The plain layer gets two modules of our own, because Megatron-Core's refuse what we need: attention over packed sequences,
and an RMSNorm that can stand in a sequence-parallel region.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_rl.runtime import device


class PackedAttention(nn.Module):
    """Causal attention in which packed sequences do not see each other; Megatron's core-attention interface.

    Query [t, heads, d], key and value [t, kv heads, d] hold sequences one after the other (`qkv_format="thd"`). They are
    laid out as [sequences, heads, longest, d] for one fused call: the padding lies after each sequence's last token, where
    a causal mask hides it.
    """

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        if config.context_parallel_size > 1:
            raise ValueError("actor.parallel.context > 1 needs Transformer Engine's attention, which is not installed")
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: Any,
        **_: Any,
    ) -> Tensor:
        offsets = packed_seq_params.cu_seqlens_q.long()
        lengths = offsets.diff()
        longest, num_tokens = int(packed_seq_params.max_seqlen_q), query.shape[0]
        # Slot of every token in the padded layout.
        slots = torch.arange(num_tokens, device=query.device) + (
            torch.arange(len(lengths), device=query.device) * longest - offsets[:-1]
        ).repeat_interleave(lengths, output_size=num_tokens)

        def pad(x: Tensor) -> Tensor:
            padded = x.new_zeros(len(lengths) * longest, *x.shape[1:]).index_copy(0, slots, x)
            return padded.view(len(lengths), longest, *x.shape[1:]).transpose(1, 2)

        out = F.scaled_dot_product_attention(
            pad(query),
            pad(key),
            pad(value),
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2).flatten(0, 1).index_select(0, slots)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}


class SequenceParallelRMSNorm(nn.RMSNorm):
    """torch's RMSNorm; its weight is marked so that Megatron sums its gradient over sequence-parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def layer_spec(config: Any) -> Any:
    """Megatron `ModuleSpec` of a decoder layer (or of the whole block, for mixture-of-experts) for `config`."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )

    experts = config.num_moe_experts
    if device.has_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts, moe_grouped_gemm=experts is not None, qk_layernorm=config.qk_layernorm
        )
    spec = get_gpt_layer_local_spec(
        num_experts=experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = SequenceParallelRMSNorm
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = SequenceParallelRMSNorm
    return spec
