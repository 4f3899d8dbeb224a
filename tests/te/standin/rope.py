"""Rotary position embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.te.standin.enums import NVTE_QKV_Format


def fused_rope_forward(
    input: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: NVTE_QKV_Format,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """[t, heads, d] turned by angles [longest, 1, 1, d2], counted from each sequence's start, in fp32."""
    return _turned(input, freqs, qkv_format, interleaved, cu_seqlens, cp_size, 1)


def fused_rope_backward(
    output_grads: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: NVTE_QKV_Format,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """The same, turned back."""
    return _turned(output_grads, freqs, qkv_format, interleaved, cu_seqlens, cp_size, -1)


def _turned(
    x: Tensor,
    freqs: Tensor,
    qkv_format: NVTE_QKV_Format,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    sign: int,
) -> Tensor:
    if qkv_format != NVTE_QKV_Format.NVTE_THD or interleaved or cp_size > 1 or cu_seqlens is None:
        raise NotImplementedError(
            "the stand-in turns packed sequences of one context-parallel rank, halves not interleaved"
        )
    lengths = cu_seqlens.diff().long()
    positions = torch.arange(len(x)) - cu_seqlens[:-1].long().repeat_interleave(lengths, output_size=len(x))
    angles = freqs[positions].squeeze(1)
    turned, rest = x[..., : angles.shape[-1]].float(), x[..., angles.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * angles.cos() + sign * torch.cat((-second, first), dim=-1) * angles.sin()
    return torch.cat((turned.to(x.dtype), rest), dim=-1)
