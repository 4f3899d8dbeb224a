"""torch's distributed checkpoints, flight recorder and gloo groups: private parts, patches of them. Written for 2.13."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TypedDict

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import WriteResult

from megatron_rl.seams import replaced

READ_METADATA, LOAD_BYTES = "self args kwargs", "self read_item value"  # parameters of what is replaced
RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # NCCL's collectives are in one of their own


def write_index(folder: Path, metadata: Metadata, stored: Mapping[MetadataIndex, StorageInfo]) -> None:
    """Writes `.metadata` for items that another writer than torch's has written."""
    results = [WriteResult(index, info.length, info) for index, info in stored.items()]
    FileSystemWriter(folder).finish(metadata, [results])


@contextlib.contextmanager
def loading_with(
    read_metadata: Callable[[Path], Metadata], load_object: Callable[[io.BytesIO, str], object]
) -> Iterator[None]:
    """Makes torch's reader and planner, which Megatron-Core's derive from, unpickle by these functions.

    Torch unpickles the index freely, and Megatron-Core the pieces that are objects. The second argument of `load_object` says
    where the bytes are from.
    """
    import torch

    load_bytes = DefaultLoadPlanner.load_bytes

    def read_known(self: FileSystemReader, *args: object, **kwargs: object) -> Metadata:
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def load_known(self: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
        assert self.metadata is not None
        info = self.metadata.storage_data[read_item.storage_index]
        content = load_object(value, f"{info.relative_path} (object {read_item.storage_index.fqn})")
        value = io.BytesIO()
        torch.save(content, value)
        value.seek(0)
        load_bytes(self, read_item, value)

    with (
        replaced(FileSystemReader, "read_metadata", read_known, READ_METADATA),
        replaced(DefaultLoadPlanner, "load_bytes", load_known, LOAD_BYTES),
    ):
        yield


class Collective(TypedDict):
    """The part in use of an entry of torch's flight recorder."""

    profiling_name: str
    time_created_ns: int
    process_group: list[str]
    is_p2p: bool
    p2p_seq_id: int
    collective_seq_id: int
    input_dtypes: list[str]
    input_sizes: list[list[int]]
    retired: bool


def recorded_collectives() -> list[tuple[Collective, str]]:
    """Every collective that torch's flight recorders remember, with the ranks of its group, in the order of entering."""
    from torch._C import _distributed_c10d as c10d

    by_start: dict[tuple[int, str], tuple[Collective, str]] = {}
    for name in RECORDERS:
        if hasattr(c10d, name):
            trace = json.loads(getattr(c10d, name)())
            groups = trace.get("pg_config", {})
            for entry in trace.get("entries", []):  # what both have counts once
                ranks = groups.get(entry["process_group"][0], {}).get("ranks", "")
                by_start[entry["time_created_ns"], entry["profiling_name"]] = (entry, ranks)
    return [by_start[key] for key in sorted(by_start)]


def make_world(group: dist.ProcessGroup) -> None:
    """Makes a group torch's world: from here on its ranks are all there are, counted from 0, to what names no group in this
    process, and to groups that are made. Groups that are there keep their ranks."""
    dist.distributed_c10d._update_default_pg(group)


INIT = "__init__"  # of `dist.ProcessGroupGloo`, compiled: without a signature that could be compared


@cache
def share_device() -> None:
    """Makes all gloo groups that this process makes from now on share a device.

    A device's thread wakes every 10 ms to look for what its connections bring. torch makes one per group, and Megatron-Core
    some 30 groups for every rank: their threads took 5 % of the CPU time of the quick start in one process.
    """
    gloo = dist.ProcessGroupGloo
    make: Callable[..., None] = getattr(gloo, INIT)

    def with_device(
        group: dist.ProcessGroupGloo,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta = dist.default_pg_timeout,
    ) -> None:
        options = gloo._Options()  # type: ignore[attr-defined]  # absent from the stubs
        options._devices, options._timeout = [_device()], timeout
        make(group, store, rank, size, options)

    setattr(gloo, INIT, with_device)


@cache
def _device() -> dist.ProcessGroupGloo.Device:
    """A device on the interface that GLOO_SOCKET_IFNAME names."""
    return dist.ProcessGroupGloo.create_default_device()
