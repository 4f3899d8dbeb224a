"""Proof that full Hugging Face tensors are what the processes' Megatron parameters are shards of, without communication.

Every element of a tensor lies on some process. Each compares the slices that it holds itself; together they compare all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_rl.models.family import Family, Model
from megatron_rl.models.hf_config import HFConfig
from megatron_rl.models.rules import shard_slices
from megatron_rl.weights.gather import values
from megatron_rl.weights.inventory import local_weights, split_axis
from megatron_rl.weights.load_hf import weight_dims
from megatron_rl.weights.parallel import ParallelGroups


@dataclass(frozen=True)
class _Held:
    """A slice [start, start + length) along `dim` of a full tensor, which this process holds from `at` on."""

    shape: tuple[int, ...]  # of the full tensor
    dim: int
    start: int
    length: int
    parameter: Tensor
    at: int

    def differs_from(self, full: Tensor) -> Tensor:
        """A bool, on the device."""
        if tuple(full.shape) != self.shape:
            return torch.ones((), dtype=torch.bool, device=full.device)
        own = values(self.parameter).narrow(self.dim, self.at, self.length)
        return (full.narrow(self.dim, self.start, self.length) != own).any()


class ShardProof:
    """Compares a stream of (Hugging Face name, full tensor) with this process's parameters as it passes by."""

    def __init__(
        self, model_chunks: Sequence[nn.Module], family: Family, hf_config: HFConfig, parallel: ParallelGroups
    ) -> None:
        model = Model(family, family.describe(hf_config))
        self._held: dict[str, list[_Held]] = defaultdict(list)
        self._seen: dict[str, Tensor] = {}  # whether a tensor differs from what is held
        for weight in local_weights(model_chunks, model, parallel):
            rule, axis, at = weight.rule, split_axis(weight.rule, parallel), 0
            if rule.is_output and model.description.tied:
                continue  # a copy of the embedding
            dims = weight_dims(tuple(weight.parameter.shape), rule, model.dims, axis.size)
            for piece in shard_slices(rule, dims, axis.rank, axis.size):
                tensor = rule.hf[piece.tensor]
                held = _Held(tensor.sizes(dims), rule.dim, piece.start, piece.length, weight.parameter, at)
                self._held[tensor.name].append(held)
                at += piece.length

    @torch.no_grad()
    def watching(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same stream. The device is not waited for."""
        for name, full in weights:
            if name in self._held:
                self._seen[name] = torch.stack([held.differs_from(full) for held in self._held[name]]).any()
            yield name, full

    def wrong(self) -> list[str]:
        """Tensors that were not what is held here, in the order in which they came."""
        differ = torch.stack(list(self._seen.values())).tolist() if self._seen else []
        return [name for name, does in zip(self._seen, differ, strict=True) if does]

    def missing(self) -> list[str]:
        """Tensors that are held here and did not come."""
        return [name for name in self._held if name not in self._seen]
