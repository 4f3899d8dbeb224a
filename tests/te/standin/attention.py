"""Attention over packed sequences, of whole ones or of a context-parallel rank's part; and their padded form."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tests.te.standin.enums import (
    DType,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)

if TYPE_CHECKING:
    from transformer_engine.pytorch.attention.dot_product_attention.utils import FusedAttentionParams


def get_fused_attn_backend(params: FusedAttentionParams) -> tuple[NVTE_Fused_Attn_Backend, str]:
    """The one for 16 bits and any length, where queries, keys and values are packed and the mask is causal; else why none."""
    masks = (NVTE_Mask_Type["NVTE_PADDING_CAUSAL_MASK"], NVTE_Mask_Type["NVTE_PADDING_MASK"])
    ours = (
        params.qkv_dtype in (DType.kBFloat16, DType.kFloat16)
        and params.qkv_layout == NVTE_QKV_Layout["NVTE_THD_THD_THD"]
        and params.bias_type == NVTE_Bias_Type["NVTE_NO_BIAS"]
        and params.attn_mask_type in masks
        and params.softmax_type == NVTE_Softmax_Type["NVTE_VANILLA_SOFTMAX"]
        and (params.window_size_left, params.window_size_right) in ((-1, -1), (-1, 0))
    )
    if ours:
        return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, ""
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend, "the stand-in has packed causal attention in 16 bits only"


def _tiles(cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor) -> list[tuple[slice, slice]]:
    """Yields the queries and the keys of each sequence."""
    ends = [cu_seqlens_q.tolist(), cu_seqlens_kv.tolist()]
    return [(slice(a, b), slice(c, d)) for (a, b), (c, d) in zip(*map(pairwise, ends), strict=True)]


def _scores(q: Tensor, k: Tensor, scale: float, mask: NVTE_Mask_Type) -> Tensor:
    """Queries [s, heads, d] and as many keys or others, of all heads -> float32 [heads, queries, keys]."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if mask == NVTE_Mask_Type["NVTE_PADDING_CAUSAL_MASK"]:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
    return scores


def _of_all_heads(tensor: Tensor, q: Tensor) -> Tensor:
    """Keys or values, each for as many heads as share it; float32."""
    return tensor.float().repeat_interleave(q.shape[1] // tensor.shape[1], dim=1)


def fused_attn_fwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_training: bool,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: NVTE_QKV_Layout,
    o_format: NVTE_QKV_Format,
    qkv_scale_inv_format: NVTE_QKV_Format,
    bias_type: NVTE_Bias_Type,
    attn_mask_type: NVTE_Mask_Type,
    softmax_type: NVTE_Softmax_Type,
    window_size: Sequence[int],
    bottom_right_diagonal: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    *_: object,
) -> list[Tensor]:
    """Attention in fp32, rounded; the logarithm of each softmax's denominator, [queries, heads, 1]; a random state."""
    q, k, v = Q.float(), _of_all_heads(K, Q), _of_all_heads(V, Q)
    out, lse = torch.zeros_like(q), torch.zeros(*q.shape[:2], 1)
    for queries, keys in _tiles(cu_seqlens_q, cu_seqlens_kv):
        scores = _scores(q[queries], k[keys], attn_scale, attn_mask_type)
        lse[queries, :, 0] = scores.logsumexp(dim=2).T
        out[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(dim=2), v[keys])
    return [out.to(Q.dtype), lse, torch.empty(0, dtype=torch.int64)]


def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: NVTE_QKV_Layout,
    o_format: NVTE_QKV_Format,
    do_format: NVTE_QKV_Format,
    dqkv_layout: NVTE_QKV_Layout,
    qkv_scale_inv_format: NVTE_QKV_Format,
    do_scale_inv_format: NVTE_QKV_Format,
    bias_type: NVTE_Bias_Type,
    attn_mask_type: NVTE_Mask_Type,
    softmax_type: NVTE_Softmax_Type,
    window_size: Sequence[int],
    bottom_right_diagonal: bool,
    deterministic: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    O: Tensor,
    dO: Tensor,
    fake_dtype: torch.dtype,
    aux_ctx_tensors: Sequence[Tensor],
    *_: object,
) -> list[Tensor]:
    """The gradients of queries, keys, values and of no bias, by the forward pass's denominators: with context parallelism
    these are of more keys than come here, and so is the output."""
    q, k, v = Q.float(), _of_all_heads(K, Q), _of_all_heads(V, Q)
    out, grad, lse = O.float(), dO.float(), aux_ctx_tensors[0][..., 0]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for queries, keys in _tiles(cu_seqlens_q, cu_seqlens_kv):
        shares = (_scores(q[queries], k[keys], attn_scale, attn_mask_type) - lse[queries].T[..., None]).exp()
        dv[keys] = torch.einsum("hqk,qhd->khd", shares, grad[queries])
        own = (grad[queries] * out[queries]).sum(dim=2).T[..., None]
        dscores = shares * (torch.einsum("qhd,khd->hqk", grad[queries], v[keys]) - own) * attn_scale
        dq[queries] = torch.einsum("hqk,khd->qhd", dscores, k[keys])
        dk[keys] = torch.einsum("hqk,qhd->khd", dscores, q[queries])
    dk, dv = (tensor.unflatten(1, (K.shape[1], -1)).sum(dim=2) for tensor in (dk, dv))
    return [dq.to(Q.dtype), dk.to(K.dtype), dv.to(V.dtype), torch.empty(0)]


# ------------------------------------------------------------------------------------------------- context parallelism
# A rank has two halves of every sequence: a piece from its beginning, and one from its end. Denominators are [heads, tokens].
def _half(cu_seqlens: Tensor, number: int) -> Tensor:
    """Indices of the tokens in every sequence's first or second half."""
    halves = [(a, (a + b) // 2, b) for a, b in pairwise(cu_seqlens.tolist())]
    return torch.cat([torch.arange(*half[number : number + 2]) for half in halves])


def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half_idx: int) -> Tensor:
    return tensor[_half(cu_seqlens, half_idx)]


def thd_read_second_half_lse(lse: Tensor, cu_seqlens: Tensor, lse_packed: bool, second_half_lse_seqlen: int) -> Tensor:
    return lse[:, _half(cu_seqlens, 1)]


def thd_second_half_lse_correction(lse: Tensor, lse_per_step: Tensor, cu_seqlens: Tensor, lse_packed: bool) -> None:
    second = _half(cu_seqlens, 1)
    lse[:, second] = torch.logaddexp(lse[:, second], lse_per_step)


def thd_out_correction(
    out: Tensor,
    out_per_step: Tensor,
    old_lse: Tensor,
    lse: Tensor,
    lse_per_step: Tensor,
    cu_seqlens: Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    """Adds a step's output to that of the earlier steps, each for its share of the denominator."""
    rows = _half(cu_seqlens, 1) if only_second_half else torch.arange(len(out))
    before, share = ((part - lse[:, rows]).exp().T[..., None] for part in (old_lse[:, rows], lse_per_step))
    out[rows] = (out[rows] * before + out_per_step.view(-1, *out.shape[1:]) * share).to(out.dtype)


def thd_grad_correction(
    grad: Tensor, grad_per_step: Tensor, cu_seqlens: Tensor, first_half: str, second_half: str
) -> None:
    """Copies or adds a step's gradient to the halves that it has."""
    whole = "none" not in (first_half, second_half)
    for number, what in enumerate((first_half, second_half)):
        rows = _half(cu_seqlens, number)
        if what != "none":
            own = grad_per_step[rows] if whole else grad_per_step
            grad[rows] = own + (grad[rows] if what == "add" else 0)


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
