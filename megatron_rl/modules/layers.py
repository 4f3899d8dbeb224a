"""Two modules for Megatron-Core's plain layers, whose own refuse what is needed here: attention over packed sequences, and an
RMSNorm that can stand in a sequence-parallel region."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig


class PackedAttention(nn.Module):
    """Causal attention in which packed sequences do not see each other; Megatron's core-attention interface.

    Query [t, heads, d], key and value [t, kv heads, d] hold sequences one after the other (`qkv_format="thd"`). With context
    parallelism every rank attends for all tokens and keeps its own: right, but no faster than without. Transformer Engine's
    attention passes keys and values around instead.

    Sliding windows are in the layers that `window_attn_skip_freq` says. With `softmax_type="learnable"` each head has a sink,
    `softmax_offset` [heads of this rank], as Transformer Engine's has.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 1,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: object,
    ) -> None:
        from megatron.core.transformer.utils import is_layer_window_attention

        super().__init__()
        self.softmax_scale = softmax_scale
        self.window: int | None = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self.window = config.window_size[0] + 1  # Megatron does not count the query's own token
        self.softmax_offset: nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
        self._groups = pg_collection
        self.context_group: dist.ProcessGroup | None = None
        if pg_collection is not None and config.context_parallel_size > 1:
            self.context_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedSeqParams,
        **_: object,
    ) -> Tensor:
        offsets, longest = packed_seq_params.cu_seqlens_q.long(), int(packed_seq_params.max_seqlen_q)
        if self.context_group is None:
            return self._attend(query, key, value, offsets, longest)
        whole, here = self._gather(torch.cat([query, key, value], dim=1), offsets.diff().tolist())
        query, key, value = whole.split([query.shape[1], key.shape[1], value.shape[1]], dim=1)
        return self._attend(query, key, value, offsets, longest)[here]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int) -> Tensor:
        scale = self.softmax_scale
        return packed_attention(query, key, value, offsets, longest, scale, self.window, self.softmax_offset)

    def _gather(self, shard: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
        """All context-parallel ranks' tokens, each sequence in order, and which of them are this rank's."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        assert self.context_group is not None, "called with context parallelism only"
        cp, rank = self.context_group.size(), self.context_group.rank()
        ranks = [torch.from_numpy(held(lengths, cp, r)).to(shard.device) for r in range(cp)]
        gathered = gather_from_sequence_parallel_region(shard, group=self.context_group)
        return gathered[torch.cat(ranks).argsort()], ranks[rank]

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, dist.ProcessGroup] | None = None,
    ) -> dict[str, object]:
        """The sinks, cut over tensor-parallel ranks, where there are any."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        if self.softmax_offset is None:
            return {}
        assert self._groups is not None, "saved by Megatron's transformer block only"
        assert metadata is not None, "likewise"
        sharded: dict[str, object] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self._groups.tp,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return sharded


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    longest: int,
    scale: float | None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[t, heads, d] for packed queries [t, heads, d], keys and values [t, kv heads, d]; `offsets` int64 [sequences + 1].

    The padding lies after each sequence's last token, where a causal mask hides it.

    Args:
        window: tokens that a query sees, its own and those before it; None: all.
        sinks: [heads], of each head a score beside those of the keys, which takes its share of the softmax and has no value;
            None: there are none.
    """
    padding = Padding(offsets, longest)
    gqa = query.shape[1] != key.shape[1]
    out = [
        _attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale, gqa, window, sinks).transpose(1, 2)
        for q, k, v in zip(padding.pad(query), padding.pad(key), padding.pad(value), strict=True)
    ]
    return padding.unpad(out)


class Padding:
    """Packed sequences as batches of about the same length, for one call each, and back.

    `offsets`: int64 [sequences + 1], where each begins; `longest`: tokens that none is padded beyond.
    """

    def __init__(self, offsets: Tensor, longest: int) -> None:
        padded = padded_lengths(offsets.diff().cpu(), longest)
        sizes, counts = padded.unique(return_counts=True)
        # Slot of every token in the padded layout, in which sequences follow one another by padded length.
        order = padded.argsort(stable=True)
        starts = torch.empty_like(padded)
        starts[order] = padded[order].cumsum(0) - padded[order]
        tokens = int(offsets[-1])
        self.slots = torch.arange(tokens, device=offsets.device) + (
            starts.to(offsets) - offsets[:-1]
        ).repeat_interleave(offsets.diff(), output_size=tokens)
        self.sizes, self.counts = sizes.tolist(), counts.tolist()

    def pad(self, x: Tensor) -> list[Tensor]:
        """[t, ...] as batches [sequences, length, ...], filled up with zeros after each sequence's end."""
        rows = [size * count for size, count in zip(self.sizes, self.counts, strict=True)]
        flat = x.new_zeros(sum(rows), *x.shape[1:]).index_copy(0, self.slots, x)
        parts = zip(flat.split(rows), self.counts, self.sizes, strict=True)
        return [part.view(count, size, *x.shape[1:]) for part, count, size in parts]

    def unpad(self, batches: Sequence[Tensor]) -> Tensor:
        """Batches as `pad` lays them out, packed again."""
        return torch.cat([batch.flatten(0, 1) for batch in batches]).index_select(0, self.slots)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, gqa: bool, window: int | None, sinks: Tensor | None
) -> Tensor:
    """[sequences, heads, length, d] of sequences of one length, padded at their ends."""
    if window is None and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=gqa)
    length = query.shape[2]
    visible = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    if window is not None:
        visible = visible.triu(1 - window)
    if sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale, enable_gqa=gqa)
    # A sink is a key that every query sees, of zeros as its value is; its score is in the mask, which has a gradient.
    scores = query.new_zeros(length, length).masked_fill(~visible, -torch.inf).expand(query.shape[1], -1, -1)
    scores = torch.cat([scores, sinks.to(query.dtype).view(-1, 1, 1).expand(-1, length, 1)], dim=-1)[None]
    key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=scores, scale=scale, enable_gqa=gqa)


def padded_lengths(lengths: Tensor, longest: int) -> Tensor:
    """The lengths to which sequences are padded, int64: multiples of 32 (the rows that a CPU's kernel takes at a time), above
    128 of a quarter of the next power of two, so that there are few of them; at most `longest`.

    The shortest are padded to 40: at 32 the kernel's backward pass would round otherwise than at every other length.
    """
    unit = (2 ** (lengths.double().log2().ceil() - 2)).long().clamp(min=32)
    padded = (lengths + unit - 1) // unit * unit
    return padded.clamp(min=40).clamp(max=longest)


def held(lengths: Sequence[int], cp: int, cp_rank: int) -> np.ndarray:
    """Indices of the packed tokens that a context-parallel rank holds, in its order; int64 [sum(lengths) / cp].

    Each sequence is cut into 2 cp pieces, and rank r has the r-th from its start and the r-th from its end, so that causal
    attention is as much work on every rank. It is the order that Megatron-Core and Transformer Engine count on.
    `lengths`: tokens of each sequence, multiples of 2 cp where cp > 1.
    """
    if cp == 1:
        return np.arange(sum(lengths))
    indices, start = [], 0
    for length in lengths:
        piece, odd = divmod(length, 2 * cp)
        if odd:
            raise ValueError(f"a sequence of {length} tokens cannot be cut into 2 x {cp} equal pieces")
        for number in (cp_rank, 2 * cp - 1 - cp_rank):
            indices.append(start + number * piece + np.arange(piece))
        start += length
    return np.concatenate(indices)


class SequenceParallelRMSNorm(nn.RMSNorm):
    """torch's RMSNorm; its weight is marked so that Megatron sums its gradient over sequence-parallel ranks.

    Multiplies by 1 + weight with `layernorm_zero_centered_gamma`.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.zero_centered: bool = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        if self.zero_centered:  # in bf16 the sum would have half as many digits as the weight
            return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)
