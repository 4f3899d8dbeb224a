"""Megatron-Core's distributed checkpoints read as what they are: global tensors in chunks.

No process group, no model, no torch: one chunk at a time comes off the disk, and its bytes are read once. Values are unsigned
integers with the same bits.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import SEEK_CUR, SEEK_END, SEEK_SET, RawIOBase
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from blake3 import blake3

from megatron_rl.checkpoint import index, manifest
from megatron_rl.checkpoint.convert import archive
from megatron_rl.checkpoint.index import Stored
from megatron_rl.weights.files import DTYPE_NAMES, DTYPES, Bits

_STEP = 2**24  # bytes of a chunk in memory, where it is not wanted whole


class Memory:
    """Memory that is used again: the kernel takes as long to find new memory as to copy into it."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def array(self, shape: Sequence[int], bits: np.dtype[np.unsignedinteger]) -> Bits:
        """An array of any content, in the same memory as the last one."""
        nbytes = math.prod(shape) * bits.itemsize
        if nbytes > self._bytes.nbytes:
            self._bytes = np.empty(0, np.uint8)  # frees it first
            self._bytes = np.empty(nbytes, np.uint8)
        return self._bytes[:nbytes].view(bits).reshape(shape)


class TorchDist:
    """The tensors of a distributed checkpoint (`torch_dist`) by global name; a chunk's checksum is compared when it is read.

    Raises:
        ValueError: the folder is no such checkpoint, or a file is missing, cut short or damaged: file and tensor are named.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / index.METADATA).is_file():
            raise ValueError(f"{self.folder} holds no Megatron checkpoint of format torch_dist: it has no .metadata")
        self.tensors = index.read_tensors(self.folder)
        self._digests: dict[tuple[str, int], str] = {}
        if (self.folder / manifest.TENSORS).is_file():
            problem = manifest.missing(self.folder)
            if problem is not None:
                raise ValueError(f"{self.folder}: {problem}")
            self._digests = {(p.file, p.offset): p.digest for p in manifest.read_tensors(self.folder)[1]}
        self._by_lead: dict[str, dict[tuple[int, ...], list[Stored]]] = {}
        self._kept: dict[Stored, Bits] = {}
        self._memory = Memory()
        try:
            self._check()
        except TypeError as error:  # its parts do not go together
            raise ValueError(f"{self.folder / index.METADATA} is damaged: {error!r}") from error

    def _check(self) -> None:
        sizes: dict[str, int] = {}
        for name, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                if chunk.file not in sizes:
                    sizes[chunk.file] = self._file_size(chunk.file, name)
                if chunk.offset + chunk.length > sizes[chunk.file]:
                    raise ValueError(
                        f"{self.folder / chunk.file} is cut short: it has {sizes[chunk.file]} bytes, and "
                        f"tensor {name} ends at byte {chunk.offset + chunk.length}"
                    )
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

    def bits(self, name: str) -> np.dtype[np.unsignedinteger]:
        return DTYPES[DTYPE_NAMES[self.tensors[name].dtype]].bits

    def read(self, name: str, lead: tuple[int, ...], start: Sequence[int], out: Bits) -> None:
        """Fills `out` with values of a tensor: at the leading indices `lead`, in the box that begins at `start`.

        Chunks that give only a part of themselves are kept until a read has no use for them.
        """
        chunks = self.overlapping(name, lead)
        self._kept = {chunk: values for chunk, values in self._kept.items() if chunk in chunks}
        covered = 0
        for chunk in chunks:
            offsets, sizes = chunk.start[len(lead) :], chunk.size[len(lead) :]
            low = [max(a, b) for a, b in zip(start, offsets, strict=True)]
            high = [min(a + n, b + s) for a, n, b, s in zip(start, out.shape, offsets, sizes, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            overlap = out[tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))]
            covered += overlap.size
            if overlap.size == math.prod(chunk.size) and overlap.flags.c_contiguous and chunk not in self._kept:
                self._load(name, chunk, overlap.reshape(chunk.size))
                continue
            if chunk not in self._kept:
                self._kept[chunk] = np.empty(chunk.size, self.bits(name))
                self._load(name, chunk, self._kept[chunk])
            values = self._kept[chunk]
            for number, first in zip(lead, chunk.start, strict=False):
                values = values[number - first]
            overlap[...] = values[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets, strict=True))]
        if covered != out.size:
            raise ValueError(f"{self.folder}: the chunks of tensor {name} overlap, or do not cover it")

    def _load(self, name: str, chunk: Stored, out: Bits) -> None:
        """One chunk, whole, into memory of its size that is contiguous."""
        flat, at = out.reshape(-1), 0
        for values in self.stored(name, chunk):
            flat[at : at + values.size] = values
            at += values.size

    def stored(self, name: str, chunk: Stored) -> Iterator[Bits]:
        """A chunk's values in their order, some at a time; they hold until the next are asked for.

        Raises:
            ValueError: it is damaged; a checksum that does not fit is known after the last value.
        """
        path, wanted, bits = self.folder / chunk.file, self.tensors[name].dtype, self.bits(name)
        with path.open("rb", buffering=0) as file, ThreadPoolExecutor(1, thread_name_prefix="checksum") as pool:
            try:
                saved = archive.read(cast(BinaryIO, _Slice(file, chunk.offset, chunk.length)))
                if saved.size != chunk.size or saved.dtype != wanted:
                    raise ValueError(f"it holds {saved.size} {saved.dtype} where .metadata says {chunk.size} {wanted}")
                saved.check(chunk.length, bits.itemsize)
            except (*archive.DAMAGE, *index.DAMAGE) as error:
                raise ValueError(f"{path} is damaged in tensor {name}: {error}") from error
            start, end = chunk.offset + saved.offset, chunk.offset + saved.offset + saved.nbytes
            digest = blake3(os.pread(file.fileno(), saved.offset, chunk.offset))
            step = _STEP if saved.is_plain else max(saved.nbytes, 1)
            for at in range(start, end, step):
                block = self._memory.array([min(step, end - at) // bits.itemsize], bits)
                _fill(block, file, at)
                hashing = pool.submit(digest.update, block.data.cast("B"))
                yield block if saved.is_plain else saved.strided(block)
                hashing.result()
            digest.update(os.pread(file.fileno(), chunk.offset + chunk.length - end, end))
        found = digest.hexdigest(length=manifest.DIGEST_BYTES)
        if found != self._digests.get((chunk.file, chunk.offset), found):
            raise ValueError(
                f"{path} is damaged in tensor {name}: the checksum of bytes {chunk.offset} and on does not fit"
            )

    def rows(self, name: str, lead: tuple[int, ...], start: Sequence[int], shape: Sequence[int]) -> list[Stored]:
        """The chunks that hold the box of this shape one after the other, in its order; the last may hold more rows. Empty
        where chunks are cut otherwise."""
        chunks, row = [], start[0]
        for chunk in sorted(self.overlapping(name, lead), key=lambda chunk: chunk.start):
            offsets, sizes = chunk.start[len(lead) :], chunk.size[len(lead) :]
            if not row <= offsets[0] < start[0] + shape[0]:
                continue
            if (offsets[0], *offsets[1:], *sizes[1:]) != (row, *start[1:], *shape[1:]):
                return []
            if math.prod(chunk.size) != math.prod(sizes):
                return []
            chunks.append(chunk)
            row += sizes[0]
        return chunks if row >= start[0] + shape[0] else []

    def forget(self) -> None:
        """Frees the chunks that are kept."""
        self._kept = {}

    def overlapping(self, name: str, lead: tuple[int, ...]) -> list[Stored]:
        if name not in self._by_lead:
            found: dict[tuple[int, ...], list[Stored]] = {}
            for chunk in self.tensors[name].chunks:
                spans = [range(o, o + s) for o, s in zip(chunk.start, chunk.size, strict=True)][: len(lead)]
                for place in itertools.product(*spans):
                    found.setdefault(place, []).append(chunk)
            self._by_lead[name] = found
        return self._by_lead[name].get(lead, [])


def _fill(out: Bits, file: BinaryIO, offset: int) -> None:
    view = out.data.cast("B")
    while view:
        count = os.preadv(file.fileno(), [view], offset)
        if count == 0:
            raise ValueError(f"{file.name} ends early: it was cut short")
        view, offset = view[count:], offset + count


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
