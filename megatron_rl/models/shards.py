"""Merging Megatron's tensor-parallel shards into Hugging Face tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.models.rules import Dims, Rule, Sharding, shard_slices


def merge_shards(rule: Rule, shards: Sequence[Tensor], dims: Dims) -> dict[str, Tensor]:
    """The full Hugging Face tensors from the shards of all tensor-parallel ranks.

    A tensor that is one whole shard comes back as a view of it, anything else as new memory.
    """
    if rule.sharding is Sharding.REPLICATED and len(rule.hf) == 1:
        return {rule.hf[0].name: shards[0]}
    pieces = [shard_slices(rule, dims, rank, len(shards)) for rank in range(len(shards))]
    if len(shards) == 1 and len(rule.hf) == 1:
        return {rule.hf[0].name: shards[0].narrow(rule.dim, 0, pieces[0][0].length)}
    full = [shards[0].new_empty(tensor.sizes(dims)) for tensor in rule.hf]
    for shard, own in zip(shards, pieces, strict=True):
        at = 0
        for piece in own:
            target = full[piece.tensor].narrow(rule.dim, piece.start, piece.length)
            target.copy_(shard.narrow(rule.dim, at, piece.length))
            at += piece.length
    return {tensor.name: value for tensor, value in zip(rule.hf, full, strict=True)}


def tensor_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
