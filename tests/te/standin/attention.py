"""Attention over packed sequences, by the packed attention of the project's own layers; and their padded form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.models.layers import packed_attention
from tests.te.standin.enums import (
    DType,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)


def get_fused_attn_backend(
    is_training: bool,
    q_dtype: DType,
    kv_dtype: DType,
    qkv_layout: NVTE_QKV_Layout,
    bias_type: NVTE_Bias_Type,
    attn_mask_type: NVTE_Mask_Type,
    softmax_type: NVTE_Softmax_Type,
    *_: object,
) -> NVTE_Fused_Attn_Backend:
    """The one for 16 bits and any length, where queries, keys and values are packed and the mask is causal."""
    ours = (
        q_dtype in (DType.kBFloat16, DType.kFloat16)
        and qkv_layout == NVTE_QKV_Layout["NVTE_THD_THD_THD"]
        and bias_type == NVTE_Bias_Type["NVTE_NO_BIAS"]
        and attn_mask_type == NVTE_Mask_Type["NVTE_PADDING_CAUSAL_MASK"]
        and softmax_type == NVTE_Softmax_Type["NVTE_VANILLA_SOFTMAX"]
    )
    backends = NVTE_Fused_Attn_Backend
    return backends.NVTE_F16_arbitrary_seqlen if ours else backends.NVTE_No_Backend


def _attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float) -> Tensor:
    return packed_attention(q.float(), k.float(), v.float(), cu_seqlens.long(), longest, scale)


def fused_attn_fwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_training: bool,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: NVTE_QKV_Layout,
    bias_type: NVTE_Bias_Type,
    attn_mask_type: NVTE_Mask_Type,
    softmax_type: NVTE_Softmax_Type,
    window_size: Sequence[int],
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    *_: object,
) -> list[Tensor]:
    """Attention in fp32, rounded; with what stands for the softmax's statistics and the random state."""
    out = _attend(Q, K, V, cu_seqlens_q, max_seqlen_q, attn_scale).to(Q.dtype)
    return [out, torch.empty(0), torch.empty(0, dtype=torch.int64)]


def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: NVTE_QKV_Layout,
    bias_type: NVTE_Bias_Type,
    attn_mask_type: NVTE_Mask_Type,
    softmax_type: NVTE_Softmax_Type,
    window_size: Sequence[int],
    deterministic: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    O: Tensor,
    dO: Tensor,
    *_: object,
) -> list[Tensor]:
    """The gradients of queries, keys and values, from the forward pass done again."""
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in (Q, K, V)]
        out = _attend(*inputs, cu_seqlens_q, max_seqlen_q, attn_scale)
        return list(torch.autograd.grad(out, inputs, dO.float()))


def _slots(cu_seqlens: Tensor, longest: int, tokens: int) -> Tensor:
    """Where each packed token lies among [sequences x longest]."""
    lengths = cu_seqlens.diff().long()
    shift = torch.arange(len(lengths)) * longest - cu_seqlens[:-1].long()
    return torch.arange(tokens) + shift.repeat_interleave(lengths, output_size=tokens)


def convert_thd_to_bshd(tensor: Tensor, cu_seqlens: Tensor, b: int, max_seq_len: int) -> Tensor:
    """[t, heads, d] -> [b, longest, heads, d], padded with zeros."""
    padded = tensor.new_zeros(b * max_seq_len, *tensor.shape[1:])
    padded[_slots(cu_seqlens, max_seq_len, len(tensor))] = tensor
    return padded.view(b, max_seq_len, *tensor.shape[1:])


def convert_bshd_to_thd(tensor: Tensor, cu_seqlens: Tensor, t: int) -> Tensor:
    """[b, longest, heads, d] -> [t, heads, d]."""
    return tensor.flatten(0, 1)[_slots(cu_seqlens, tensor.shape[1], int(t))]
