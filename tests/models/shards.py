"""Cutting Hugging Face tensors into Megatron's shards by `shard_slices`: the way there of `merge_shards`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megatron_rl.models.rules import Dims, Rule, shard_shape, shard_slices


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
    for piece in shard_slices(rule, dims, rank, tp):
        source = sources[piece.tensor].narrow(rule.dim, piece.start, piece.length)
        shard.narrow(rule.dim, at, piece.length).copy_(source)
        at += piece.length
    return shard
