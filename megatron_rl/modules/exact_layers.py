"""The actor's modules with `rollout.exact`: they compute with `base.exact_rows`, as the engine's then do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.mlp import MLP
from torch import Tensor, nn

from megatron_rl.base import exact_rows as exact
from megatron_rl.models import Model
from megatron_rl.modules.layers import PackedAttention, Padding, SequenceParallelRMSNorm
from megatron_rl.modules.rotary import inverse_frequencies
from megatron_rl.seams.megatron_exact import make_experts_exact, make_products_exact

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_rl.seams.megatron import Chunk


def rotary_table(model: Model) -> Tensor:
    """Returns `exact.rotary_table` of all positions that the model has."""
    rope = model.description.rope
    frequencies = inverse_frequencies(rope, int(rope.share * model.attention.head_width))
    return exact.rotary_table(frequencies, model.description.max_positions)


def make_exact(chunk: Chunk, model: Model) -> None:
    """From here on a chunk's forward passes are `base.exact_rows`'s, from the embedding to the last norm."""
    turns = rotary_table(model)
    make_products_exact(chunk)
    make_experts_exact(chunk)
    compute: dict[nn.Module, Callable[..., Tensor | None]] = {
        chunk.get_submodule("rotary_pos_emb"): lambda *_, **__: None  # it is attention that turns queries and keys
    }
    for module in chunk.modules():
        if isinstance(module, SequenceParallelRMSNorm):
            compute[module] = partial(_norm, module)
        elif isinstance(module, PackedAttention):
            compute[module] = partial(_attend, module, turns)
        elif isinstance(module, MLP):  # an expert has a configuration of its own
            module.config.activation_func = _activate
    for module, forward in compute.items():
        setattr(module, "forward", forward)  # noqa: B010


def _activate(x: Tensor) -> Tensor:
    return exact.silu(x)


def _norm(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    assert norm.eps is not None
    return exact.rms_norm(x, norm.weight, norm.eps)


def _attend(
    attention: PackedAttention,
    turns: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed_seq_params: PackedSeqParams,
    **_: object,
) -> Tensor:
    offsets = packed_seq_params.cu_seqlens_q.long()
    lengths = offsets.diff()
    positions = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(lengths)
    query, key = (exact.rotate(x, turns[positions]) for x in (query, key))
    scale = attention.softmax_scale or query.shape[-1] ** -0.5
    return _Attention.apply(query, key, value, offsets, int(packed_seq_params.max_seqlen_q), scale)


class _Attention(torch.autograd.Function):
    """`exact.attention` of packed sequences; the backward pass is torch's of its fused attention."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scale: float
    ) -> Tensor:
        lengths = offsets.diff()
        pages = (lengths + exact.KEYS - 1) // exact.KEYS
        first = pages.cumsum(0) - pages
        slots = torch.arange(len(key)) + (first * exact.KEYS - offsets[:-1]).repeat_interleave(lengths)
        key_pages, value_pages = (_pages(side, slots, int(pages.sum())) for side in (key, value))
        table = first[:, None] + torch.arange(int(pages.max()))
        items = exact.Items.of(lengths, lengths, exact.queries_of_item(query.shape[1], key.shape[1]))
        out, logs = exact.attention(query, key_pages, value_pages, table, items, scale)
        ctx.save_for_backward(query, key, value, offsets, out, logs)
        ctx.longest, ctx.scale = longest, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, offsets, out, logs = ctx.saved_tensors
        group, padding = query.shape[1] // key.shape[1], Padding(offsets, ctx.longest)
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        parts: list[list[Tensor]] = [[], [], []]
        for g, q, k, v, o, log in zip(*map(padding.pad, (grad, query, key, value, out, logs)), strict=True):
            wide = [side.repeat_interleave(group, dim=2) for side in (k, v)]
            heads = (x.transpose(1, 2) for x in (g, q, *wide, o))
            grads = backward(*heads, log.transpose(1, 2), 0.0, True, scale=ctx.scale)
            of_query, *of_sides = (x.transpose(1, 2) for x in grads)
            parts[0].append(of_query)
            for part, of_side in zip(parts[1:], of_sides, strict=True):
                part.append(of_side.unflatten(2, (-1, group)).sum(dim=3))
        return *map(padding.unpad, parts), None, None, None


def _pages(side: Tensor, slots: Tensor, count: int) -> Tensor:
    """[tokens, heads, d] -> [pages, heads, `exact.KEYS`, d]."""
    flat = side.new_zeros(count * exact.KEYS, *side.shape[1:]).index_copy(0, slots, side)
    return flat.view(count, exact.KEYS, *side.shape[1:]).transpose(1, 2)
