"""Megatron-Core's distributed checkpoints read as what they are: global tensors in chunks.

No process group, no model: one chunk at a time comes off the disk.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from io import SEEK_CUR, SEEK_END, SEEK_SET, RawIOBase
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_rl.checkpoint import manifest, unpickle


@dataclass(frozen=True)
class Stored:
    """One chunk on the disk; `digest` where the checkpoint lists checksums."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    offset: int
    length: int
    digest: str | None


@dataclass(frozen=True)
class GlobalTensor:
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[Stored]


class TorchDist:
    """The tensors of a distributed checkpoint (`torch_dist`) by global name; a chunk's checksum is compared when it is read.

    Raises:
        ValueError: the folder is no such checkpoint, or a file is missing, cut short or damaged: file and tensor are named.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / ".metadata").is_file():
            raise ValueError(f"{self.folder} holds no Megatron checkpoint of format torch_dist: it has no .metadata")
        metadata = unpickle.read_metadata(self.folder)
        self.listed = (self.folder / manifest.TENSORS).is_file()
        digests: dict[tuple[str, int], str] = {}
        if self.listed:
            problem = manifest.missing(self.folder)
            if problem is not None:
                raise ValueError(f"{self.folder}: {problem}")
            digests = {(p.file, p.offset): p.digest for p in manifest.read_tensors(self.folder)[1]}
        self.tensors: dict[str, GlobalTensor] = {}
        self.objects: set[str] = set()
        self._by_lead: dict[str, dict[tuple[int, ...], list[Stored]]] = {}
        self._last: tuple[Stored, Tensor] | None = None
        try:
            self._place(metadata, digests)
        except (AttributeError, LookupError, TypeError) as error:  # its parts do not go together
            raise ValueError(f"{self.folder / '.metadata'} is damaged: {error!r}") from error

    def _place(self, metadata: Metadata, digests: dict[tuple[str, int], str]) -> None:
        """Indexes the chunks of every tensor by file."""
        sizes: dict[str, int] = {}
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                self.tensors[name] = GlobalTensor(tuple(entry.size), entry.properties.dtype, [])
            else:
                self.objects.add(name)
        chunk_sizes = {
            (name, tuple(chunk.offsets)): tuple(chunk.sizes)
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
            for chunk in entry.chunks
        }
        for index, info in metadata.storage_data.items():
            if index.fqn not in self.tensors:
                continue
            if info.relative_path not in sizes:
                sizes[info.relative_path] = self._file_size(info.relative_path, index.fqn)
            if info.offset + info.length > sizes[info.relative_path]:
                raise ValueError(
                    f"{self.folder / info.relative_path} is cut short: it has {sizes[info.relative_path]} bytes, and "
                    f"tensor {index.fqn} ends at byte {info.offset + info.length}"
                )
            start = tuple(index.offset)
            digest = digests.get((info.relative_path, info.offset))
            size = chunk_sizes[index.fqn, start]
            self.tensors[index.fqn].chunks.append(
                Stored(start, size, info.relative_path, info.offset, info.length, digest)
            )
        for name, tensor in self.tensors.items():
            held = sum(math.prod(chunk.size) for chunk in tensor.chunks)
            if held != math.prod(tensor.shape):
                raise ValueError(
                    f"{self.folder}: tensor {name} has {math.prod(tensor.shape)} values, its chunks hold {held}"
                )

    def _file_size(self, name: str, tensor: str) -> int:
        path = self.folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing: it holds tensor {tensor}, among others")
        return path.stat().st_size

    def read(
        self, name: str, lead: tuple[int, ...] = (), start: Sequence[int] = (), stop: Sequence[int] = ()
    ) -> Tensor:
        """Values of a tensor: at the leading indices `lead`, in the box from `start` to `stop` (default: everything)."""
        tensor = self.tensors[name]
        rest = tensor.shape[len(lead) :]
        start, stop = tuple(start) or (0,) * len(rest), tuple(stop) or rest
        out: Tensor | None = None
        for chunk in self.overlapping(name, lead):
            offsets, sizes = chunk.start[len(lead) :], chunk.size[len(lead) :]
            low = [max(a, b) for a, b in zip(start, offsets, strict=True)]
            high = [min(a, b + s) for a, b, s in zip(stop, offsets, sizes, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            values = self.load(name, chunk)
            for number, first in zip(lead, chunk.start, strict=False):
                values = values[number - first]
            part = values[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets, strict=True))]
            if tuple(low) == start and tuple(high) == stop:
                return part
            if out is None:
                out = torch.empty([b - a for a, b in zip(start, stop, strict=True)], dtype=tensor.dtype)
            out[tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))].copy_(part)
        return (
            torch.empty([b - a for a, b in zip(start, stop, strict=True)], dtype=tensor.dtype) if out is None else out
        )

    def load(self, name: str, chunk: Stored) -> Tensor:
        """One chunk, whole; the last one is kept, since several tensors may be parts of it."""
        if self._last is not None and self._last[0] == chunk:
            return self._last[1]
        self._last = None
        path = self.folder / chunk.file
        with path.open("rb") as file:
            if chunk.digest is not None and chunk.digest != manifest.digest_at(file, chunk.offset, chunk.length):
                raise ValueError(
                    f"{path} is damaged in tensor {name}: the checksum of bytes {chunk.offset} and on does not fit"
                )
            try:
                values = torch.load(
                    cast(BinaryIO, _Slice(file, chunk.offset, chunk.length)), map_location="cpu", weights_only=True
                )
            except (RuntimeError, *unpickle.DAMAGE) as error:
                raise ValueError(f"{path} is damaged in tensor {name}: {error}") from error
        wanted = self.tensors[name].dtype
        if tuple(values.shape) != chunk.size or values.dtype != wanted:
            raise ValueError(
                f"{path} is damaged in tensor {name}: it holds {tuple(values.shape)} {values.dtype} where .metadata says "
                f"{chunk.size} {wanted}"
            )
        self._last = (chunk, values)
        return values

    def forget(self) -> None:
        """Frees the chunk that was read last."""
        self._last = None

    def overlapping(self, name: str, lead: tuple[int, ...]) -> list[Stored]:
        if name not in self._by_lead:
            found: dict[tuple[int, ...], list[Stored]] = {}
            for chunk in self.tensors[name].chunks:
                spans = [range(o, o + s) for o, s in zip(chunk.start, chunk.size, strict=True)][: len(lead)]
                for place in itertools.product(*spans):
                    found.setdefault(place, []).append(chunk)
            self._by_lead[name] = found
        return self._by_lead[name].get(lead, [])


class _Slice(RawIOBase):
    """A stretch of an open file as a file of its own."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, position: int, whence: int = SEEK_SET) -> int:
        place = {SEEK_SET: 0, SEEK_CUR: self._at, SEEK_END: self._length}[whence] + position
        if place < 0:  # from the index of a damaged archive
            raise ValueError(f"negative seek position {place}")
        self._at = place
        return place

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]  # type: ignore[arg-type]
        self._file.seek(self._offset + self._at)
        count = self._file.readinto(view) or 0  # type: ignore[attr-defined]
        self._at += count
        return count
