"""Weights from the ranks that learn to those that only generate: both ends of it.

On the engines' side it is the sync of `rollout.sync`, from a `TrainedWeights` that is elsewhere. All ranks of both roles call
`push` of their side at the same time, and `check`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.config.schema import Config
from megatron_rl.models import Model
from megatron_rl.rollout.sync import Scored, SyncDifference, TrainedWeights, WeightSync, no_plan, sliced_plan
from megatron_rl.runtime import device
from megatron_rl.runtime.distributed import ProcessGrid
from megatron_rl.weights.inventory import Key
from megatron_rl.weights.transfer import SyncError, Transfer


# -------------------------------------------------------------------------------------------------- where engines are
@dataclass
class RemoteWeights:
    """`TrainedWeights` of other ranks: slices come by the plan, whole tensors from the first rank that learns."""

    grid: ProcessGrid
    model: Model
    dtype: torch.dtype
    optimizer_steps: int = 0

    def weights(self) -> Mapping[Key, Tensor]:
        return {}

    def iter_hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        link = self.grid.everyone
        header: tuple[str, Sequence[int], torch.dtype] | None = None
        while (header := link.broadcast(header)) is not None:
            name, shape, dtype = header
            tensor = torch.empty(shape, dtype=dtype, device=device.device())
            dist.broadcast(tensor, 0, link.device_group)
            yield name, tensor

    def iter_adapters(self) -> Iterator[tuple[str, Tensor]]:
        return self.iter_hf_weights()

    def shard_proof(self) -> NoProof:
        return NoProof()


class NoProof:
    """Compares nothing: the ranks that learn do, as tensors leave."""

    def watching(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return weights

    def wrong(self) -> list[str]:
        return []

    def missing(self) -> list[str]:
        return []


class Subscriber:
    """Takes weights into an engine: the side of the ranks that generate."""

    def __init__(self, grid: ProcessGrid, source: RemoteWeights, sync: WeightSync) -> None:
        self._grid, self._source, self._sync = grid, source, sync

    def push(self) -> str:
        """Takes new weights; returns what tells their bits from others'."""
        self._source.optimizer_steps, digest = self._grid.everyone.broadcast((0, ""))
        self._sync.push()
        return digest

    def check(self) -> None:
        """Compares the engine's log-probs with those that the ranks that learn have sent, and tells them."""
        link, learners = self._grid.everyone, self._grid.learners
        nothing = list[Any]()
        sequences, images, log_probs, experts = link.broadcast((nothing, nothing, nothing, nothing))
        difference, error = SyncDifference(), None
        try:
            difference = self._sync.check(Scored(sequences, images, log_probs, lambda experts: log_probs, experts))
        except SyncError as failure:
            error = failure
        link.broadcast((difference, error and str(error)), source=learners)
        if error is not None:
            raise error


# ---------------------------------------------------------------------------------------------------- where is learned
class Publisher:
    """Sends the actor's weights, in the way that the recipe asks for; in slices where both sides can."""

    def __init__(self, config: Config, grid: ProcessGrid, source: TrainedWeights) -> None:
        self._grid, self._source = grid, source
        self._adapters = config.actor.lora is not None and config.actor.lora.sync == "adapters"
        self._transfer: Transfer | None = None
        self.why_whole: str | None = None  # though the recipe would have slices
        if not self._adapters and config.rollout.sync == "sliced":
            self.why_whole = no_plan(config, grid, source, None)
            if self.why_whole is None:
                timeout = timedelta(minutes=config.launch.timeout_minutes)
                plan = sliced_plan(config, grid, source)
                self._transfer = Transfer(plan, source.weights(), source.dtype, grid.everyone, timeout)

    def push(self, digest: str = "") -> None:
        """Brings the present weights into the engines, which have handed over what they drew. `digest`: tells the weights'
        bits from others', for the journal of conversations.

        Raises:
            SyncError: as of `WeightSync.push`.
        """
        self._grid.everyone.broadcast((self._source.optimizer_steps, digest))
        if self._transfer is not None:
            self._transfer.push(_Nowhere())
        elif self._adapters:
            self._send(self._source.iter_adapters())
        else:
            proof = self._source.shard_proof()
            self._send(proof.watching(self._source.iter_hf_weights()))
            if wrong := next(
                (names[0] for names in self._grid.all_gather([*proof.wrong(), *proof.missing()]) if names), None
            ):
                raise SyncError(
                    f"a weight sync went wrong. The first tensor that was changed as it left the actor is {wrong}."
                )

    def _send(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        link = self._grid.everyone
        for name, tensor in weights:
            link.broadcast((name, tuple(tensor.shape), tensor.dtype))
            dist.broadcast(tensor.to(device.device()).contiguous(), 0, link.device_group)
        link.broadcast(None)

    def check(self, scored: Scored) -> SyncDifference:
        """How far the engines' log-probs are from the actor's.

        Raises:
            SyncError: further than the tolerance allows.
        """
        link = self._grid.everyone
        link.broadcast((scored.sequences, scored.images, scored.log_probs, scored.experts))
        difference, error = link.broadcast((SyncDifference(), None), source=self._grid.learners)
        if error is not None:
            raise SyncError(error)
        return difference


class _Nowhere:
    """A `Loader` of a rank that has no engine."""

    def tensor(self, name: str) -> Tensor:
        raise SyncError(f"a part of {name} came to a rank without an engine")

    def count(self, name: str, elements: int) -> None:
        raise SyncError(f"a part of {name} came to a rank without an engine")
