"""From model chunks and optimizer on the device to host memory, and from there to Megatron-Core's distributed checkpoint.

Taking the snapshot is all that training waits for. A copied snapshot shares no memory with the model, so it can be written
while training goes on; `write_share` and `finish` touch neither the device nor Megatron's process groups.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch
from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from megatron_rl.checkpoint import manifest
from megatron_rl.checkpoint.gather_optimizer import StandIns
from megatron_rl.checkpoint.index import BACKEND
from megatron_rl.checkpoint.manifest import StoredChunk
from megatron_rl.runtime import device
from megatron_rl.runtime.distributed import ProcessGrid
from megatron_rl.runtime.host_memory import HostMemory
from megatron_rl.seams import megatron_checkpoint, torch_archive, torch_dist
from megatron_rl.seams.megatron import Chunk, Optimizer, OptimizerPart, State, counting_steps, standing_in
from megatron_rl.weights.adapters import adapters_in, sharded_adapters

# Optimizer state is stored whole per parameter, under a name that does not say which of Megatron's optimizers (of dense or of
# expert parameters) has it, so that it loads at any layout.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


@dataclass
class Snapshot:
    """This rank's part of a checkpoint in host memory."""

    items: list[tuple[MetadataIndex, Tensor | bytes]]
    common: bytes = b""  # rank 0: `common.pt`, what is no tensor and the same on every rank
    metadata: Metadata | None = None  # rank 0: every rank's tensors

    @property
    def num_bytes(self) -> int:
        return sum(data.nbytes if isinstance(data, Tensor) else len(data) for _, data in self.items)


@dataclass(frozen=True)
class Written:
    """One item on the disk."""

    index: MetadataIndex
    piece: StoredChunk


def sharded_model(chunks: Sequence[Chunk]) -> State:
    """Megatron's sharded state dictionary of the model alone: of one with adapters, of these."""
    return {
        f"model{i}": sharded_adapters(chunk) or chunk.sharded_state_dict(metadata=dict(METADATA))
        for i, chunk in enumerate(chunks)
    }


def restore_model(chunks: Sequence[Chunk], state: State) -> None:
    """Fills the chunks from what was asked for by `sharded_model`."""
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(state[f"model{i}"], strict=not adapters_in(chunk))


def sharded_state(chunks: Sequence[Chunk], optimizer: Optimizer, loading: bool) -> State:
    """Megatron's sharded state dictionary of model and optimizer."""
    metadata = dict(METADATA)
    model = sharded_model(chunks)
    # The optimizer wants one flat dictionary of the model's tensors to find its own by.
    flat = model["model0"] if len(chunks) == 1 else model
    with counting_steps(optimizer), standing_in(_room) if loading else contextlib.nullcontext():
        return model | {"optimizer": optimizer.sharded_state_dict(flat, is_loading=loading, metadata=metadata)}


def _room(optimizer: OptimizerPart, number: int, _key: str) -> Tensor:
    """Zeros, which take no memory until something is loaded into them: rows that pad the vocabulary stay as they are."""
    return torch.from_numpy(np.zeros(optimizer.buffers[number].numel, dtype=np.float32))


class Snapshotter:
    """Takes one snapshot after the other.

    Keeps the host memory from one to the next, and how data-parallel ranks divide what they all hold.

    Args:
        copied: False where the snapshot is written before training goes on: tensors that are in host memory already are
            then written from where they are.
    """

    def __init__(self, grid: ProcessGrid, copied: bool) -> None:
        self._grid, self._copied = grid, copied
        self._memory = HostMemory()
        self._checked = False  # that every shard has exactly one rank that writes it, which cannot change within a run
        self._division = megatron_checkpoint.Division()

    def take(self, chunks: Sequence[Chunk], optimizer: Optimizer) -> Snapshot:
        """Copies everything that this rank has to write to the host; every rank calls it. Touches no disk.

        An earlier snapshot must not be in use any more: its memory is written over.
        """
        grid = self._grid
        stand_ins = StandIns()
        with device.megatron():
            with stand_ins.in_use():
                state = sharded_state(chunks, optimizer, loading=False)
            sharded, common = megatron_checkpoint.split(state, check=not self._checked)
            self._checked = True
            if grid.dp * grid.cp > 1:
                self._division.apply(sharded)
            planner = megatron_checkpoint.save_planner(sharded, grid.is_main)
        plan = planner.create_local_plan()
        plans = grid.gather(plan)
        metadata = planner.create_global_plan(plans)[1] if grid.is_main else None
        items: list[tuple[MetadataIndex, Tensor | bytes]] = []
        copied: list[tuple[MetadataIndex, Tensor]] = []
        for item in planner.finish_plan(plan).items:
            data = planner.resolve_data(item)
            if not isinstance(data, Tensor):
                items.append((item.index, bytes(data.getbuffer())))
            elif not self._copied and data.device.type == "cpu" and not is_float8tensor(data) and data not in stand_ins:
                items.append((item.index, data.detach()))
            else:
                copied.append((item.index, data))
        self._memory.free()
        memory = self._memory.take([data.numel() * data.element_size() for _, data in copied])
        for (index, data), place in zip(copied, memory, strict=True):
            if is_float8tensor(data):  # stored in the dtype that it stands for; Megatron loads it so
                data = dequantize_fp8_tensor(data)
            host = place.view(data.dtype).view(data.shape)
            items.append((index, host))
            if data in stand_ins and data.is_contiguous():
                stand_ins.want(data, host)
            elif stand_ins and index.fqn.startswith("optimizer.state."):
                raise RuntimeError(f"the optimizer's {index.fqn} is not laid out as its parameter; it cannot be saved")
            else:
                host.copy_(data.detach(), non_blocking=True)
        stand_ins.gather(optimizer)
        device.synchronize()
        return Snapshot(items, torch_archive.saved(common) if grid.is_main else b"", metadata)


def write_share(snapshot: Snapshot, folder: Path, rank: int) -> list[Written]:
    """Writes this rank's items to one file in `folder`, and waits until they are on the disk.

    Raises:
        OSError: no room, no permission, a broken disk.
    """
    if not snapshot.items:
        return []
    name = f"__{rank}_0.distcp"
    with (folder / name).open("wb") as raw:
        file = manifest.Hashing(raw)
        try:
            written = [_write_item(file, index, data, name) for index, data in snapshot.items]
        except RuntimeError as error:
            raise (file.failure or error) from None
        raw.flush()
        os.fsync(raw.fileno())
    return written


def _write_item(file: manifest.Hashing, index: MetadataIndex, data: Tensor | bytes, name: str) -> Written:
    offset = file.position
    file.begin()
    if isinstance(data, Tensor):
        # Of a view torch.save writes the memory of the whole.
        part = data.untyped_storage().nbytes() > data.nbytes
        torch.save(data.clone() if part else data, cast(IO[bytes], file))
    else:
        file.write(data)
    start = tuple(index.offset) if index.offset is not None else ()
    return Written(index, StoredChunk(index.fqn, start, name, offset, file.position - offset, file.digest()))


def finish(snapshot: Snapshot, folder: Path, shares: Sequence[Sequence[Written]], about: Mapping[str, object]) -> None:
    """Rank 0, when every rank's share is on the disk: Megatron's own files, then the manifest, last.

    Raises:
        OSError: as above.
    """
    assert snapshot.metadata is not None, "rank 0 has it"
    everything = [written for share in shares for written in share]
    places = [(w.index, w.piece) for w in everything]
    stored = {index: torch_dist.StorageInfo(at.file, at.offset, at.length) for index, at in places}
    torch_dist.write_index(folder, snapshot.metadata, stored)
    (folder / "common.pt").write_bytes(snapshot.common)
    manifest.write_json(folder / "metadata.json", BACKEND)
    tensors = {name: _described(entry) for name, entry in snapshot.metadata.state_dict_metadata.items()}
    pieces = sorted((w.piece for w in everything), key=lambda piece: (piece.file, piece.offset))
    manifest.write(folder, about, tensors, pieces)


def _described(entry: TensorStorageMetadata | BytesStorageMetadata) -> manifest.TensorInfo:
    if isinstance(entry, TensorStorageMetadata):
        return manifest.TensorInfo(tuple(entry.size), str(entry.properties.dtype).removeprefix("torch."))
    return manifest.TensorInfo((), "object")
