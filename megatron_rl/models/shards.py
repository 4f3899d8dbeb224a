"""Cutting Hugging Face tensors into Megatron's tensor-parallel shards, and merging them again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_rl.models.rules import Dims, Kind, Rule, shard_pieces, shard_shape


def shard_tensor(rule: Rule, hf_tensors: Mapping[str, Tensor], dims: Dims, rank: int, tp: int) -> Tensor:
    """The Megatron shard of tensor-parallel rank `rank` of `tp`.

    Args:
        rule: the rule with its names filled in (`Rule.at`).
        hf_tensors: the full Hugging Face tensors by name.
        dims: sizes by symbol (`ModelDescription.dims`), with `padded_vocab` where it is not the smallest possible.
    """
    sources = [hf_tensors[tensor.name] for tensor in rule.hf]
    shard = sources[0].new_zeros(shard_shape(rule, dims, tp))
    at = 0
    for piece in shard_pieces(rule, dims, rank, tp):
        source = sources[piece.tensor].narrow(rule.dim, piece.start, piece.length)
        shard.narrow(rule.dim, at, piece.length).copy_(source)
        at += piece.length
    return shard


def merge_shards(rule: Rule, shards: Sequence[Tensor], dims: Dims) -> dict[str, Tensor]:
    """The full Hugging Face tensors from the shards of all tensor-parallel ranks: the inverse of `shard_tensor`.

    A tensor that is one whole shard comes back as a view of it, anything else as new memory.
    """
    if rule.kind is Kind.REPLICATED:
        return {rule.hf[0].name: shards[0]}
    pieces = [shard_pieces(rule, dims, rank, len(shards)) for rank in range(len(shards))]
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
