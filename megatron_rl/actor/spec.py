"""The transformer layer: Transformer Engine's modules where it is installed, Megatron-Core's plain ones elsewhere.

The plain layer gets two modules of our own, because Megatron-Core's refuse what we need: attention over packed sequences,
and an RMSNorm that can stand in a sequence-parallel region.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_rl.actor.packing import held
from megatron_rl.runtime import device


class PackedAttention(nn.Module):
    """Causal attention in which packed sequences do not see each other; Megatron's core-attention interface.

    Query [t, heads, d], key and value [t, kv heads, d] hold sequences one after the other (`qkv_format="thd"`). With context
    parallelism every rank attends for all tokens and keeps its own: right, but no faster than without. Transformer Engine's
    attention passes keys and values around instead.
    """

    def __init__(self, config: Any, softmax_scale: float | None = None, pg_collection: Any = None, **_: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.context_group: Any = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: Any,
        **_: Any,
    ) -> Tensor:
        offsets, longest = packed_seq_params.cu_seqlens_q.long(), int(packed_seq_params.max_seqlen_q)
        if self.context_group is None:
            return packed_attention(query, key, value, offsets, longest, self.softmax_scale)
        whole, here = self._gather(torch.cat([query, key, value], dim=1), offsets.diff().tolist())
        query, key, value = whole.split([query.shape[1], key.shape[1], value.shape[1]], dim=1)
        return packed_attention(query, key, value, offsets, longest, self.softmax_scale)[here]

    def _gather(self, own: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
        """All context-parallel ranks' tokens, each sequence in order, and which of them are this rank's."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        cp, rank = self.context_group.size(), self.context_group.rank()
        ranks = [torch.from_numpy(held(lengths, cp, r)).to(own.device) for r in range(cp)]
        gathered = gather_from_sequence_parallel_region(own, group=self.context_group)
        return gathered[torch.cat(ranks).argsort()], ranks[rank]

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scale: float | None
) -> Tensor:
    """[t, heads, d] for packed queries [t, heads, d], keys and values [t, kv heads, d]; `offsets` int64 [sequences + 1].

    Sequences are laid out as [sequences, heads, longest, d] for one fused call: the padding lies after each sequence's last
    token, where a causal mask hides it.
    """
    lengths, num_tokens = offsets.diff(), query.shape[0]
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
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).flatten(0, 1).index_select(0, slots)


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
