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
    """[t, heads, d] turned by angles [longest, 1, 1, d2], counted from each sequence's start, in fp32; with context
    parallelism of this rank's two pieces of every sequence."""
    return _turned(input, freqs, qkv_format, interleaved, cu_seqlens, (cp_size, cp_rank), 1)


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
    return _turned(output_grads, freqs, qkv_format, interleaved, cu_seqlens, (cp_size, cp_rank), -1)


def _turned(
    x: Tensor,
    freqs: Tensor,
    qkv_format: NVTE_QKV_Format,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    context: tuple[int, int],
    sign: int,
) -> Tensor:
    if qkv_format != NVTE_QKV_Format.NVTE_THD or interleaved or cu_seqlens is None:
        raise NotImplementedError("the stand-in turns packed sequences, halves not interleaved")
    (size, rank), starts = context, cu_seqlens.long() // context[0]
    lengths = starts.diff()
    length = lengths.repeat_interleave(lengths, output_size=len(x))  # of a token's sequence, on this rank
    positions = torch.arange(len(x)) - starts[:-1].repeat_interleave(lengths, output_size=len(x))
    if size > 1:  # a piece from the sequence's beginning, and one from its end
        piece = length // 2
        positions += torch.where(positions < piece, rank * piece, (2 * size - rank - 2) * piece)
    angles = freqs[positions].squeeze(1)
    turned, rest = x[..., : angles.shape[-1]].float(), x[..., angles.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * angles.cos() + sign * torch.cat((-second, first), dim=-1) * angles.sin()
    return torch.cat((turned.to(x.dtype), rest), dim=-1)
