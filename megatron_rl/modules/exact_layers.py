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
from megatron_rl.modules.layers import PackedAttention, SequenceParallelRMSNorm, packed_attention
from megatron_rl.modules.rotary import inverse_frequencies
from megatron_rl.runtime import device
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
    turns = rotary_table(model).to(device.device())
    if device.has_gpu():
        from megatron_rl.seams import vllm_invariant

        vllm_invariant.use()
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
    offsets, longest = packed_seq_params.cu_seqlens_q.long(), int(packed_seq_params.max_seqlen_q)
    positions = torch.arange(len(query), device=query.device) - offsets[:-1].repeat_interleave(offsets.diff())
    query, key = (exact.rotate(x, turns[positions]) for x in (query, key))
    scale = attention.softmax_scale or query.shape[-1] ** -0.5
    if device.has_gpu():
        from megatron_rl.seams.vllm_invariant import attend

        exactly = partial(attend, queries=offsets, keys=offsets, longest=longest, scale=scale)
    else:
        exactly = partial(_attend_on_cpu, offsets=offsets, scale=scale)
    return _Attention.apply(
        query, key, value, exactly, partial(packed_attention, offsets=offsets, longest=longest, scale=scale)
    )


class _Attention(torch.autograd.Function):
    """`exactly`, with the gradient of `plainly`, which is computed again for it."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        exactly: Callable[..., Tensor],
        plainly: Callable[..., Tensor],
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.plainly = plainly
        return exactly(query, key, value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            grads = torch.autograd.grad(ctx.plainly(*inputs), inputs, grad)
        return *grads, None, None


def _attend_on_cpu(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, scale: float) -> Tensor:
    lengths = offsets.diff()
    pages = (lengths + exact.KEYS - 1) // exact.KEYS
    first = pages.cumsum(0) - pages
    slots = torch.arange(len(key)) + (first * exact.KEYS - offsets[:-1]).repeat_interleave(lengths)
    key_pages, value_pages = (_pages(side, slots, int(pages.sum())) for side in (key, value))
    table = first[:, None] + torch.arange(int(pages.max()))
    items = exact.Items.of(lengths, lengths, exact.queries_of_item(query.shape[1], key.shape[1]))
    return exact.attention(query, key_pages, value_pages, table, items, scale)


def _pages(side: Tensor, slots: Tensor, count: int) -> Tensor:
    """[tokens, heads, d] -> [pages, heads, `exact.KEYS`, d]."""
    flat = side.new_zeros(count * exact.KEYS, *side.shape[1:]).index_copy(0, slots, side)
    return flat.view(count, exact.KEYS, *side.shape[1:]).transpose(1, 2)
