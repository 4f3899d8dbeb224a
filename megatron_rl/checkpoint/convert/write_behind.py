"""Getting a large file to the disk while it is still being made, without filling the page cache with it."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from megatron_rl.checkpoint import manifest

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_PAGE = 2**12  # bytes; what is written directly begins and ends at a multiple of it, in memory and in the file
_STAGES = 3  # blocks that wait to be written
_BLOCK = 2**22  # bytes that are moved at once; they are still in the processor's cache when their checksum is taken


def in_blocks(data: memoryview, offset: int, move: Callable[[memoryview, int], int], digest: blake3) -> None:
    """Moves all of `data` between memory and a file: `move(part of it, place in the file)` returns how many bytes it did.

    A checksum is taken of each block beside the move of the next.

    Raises:
        EOFError: `move` did nothing.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="checksum") as pool:
        taken: Future[object] | None = None
        while data:
            count = move(data[:_BLOCK], offset)
            if count == 0:
                raise EOFError
            if taken is None and count == len(data):
                digest.update(data)  # small: no thread for it
            else:
                taken = pool.submit(digest.update, data[:count])
            data, offset = data[count:], offset + count
        if taken is not None:
            taken.result()


class WriteBehind:
    """A new file whose bytes go to the disk in the background, past the page cache.

    Through the page cache the kernel keeps a copy of all that is written: a model's worth of memory, which in a container
    counts against its limit and takes longer to find than to fill; and the disk has most of its work at the end. What fills
    no page of the file goes through it, and everything where the file system has no direct writes. On leaving, all is on the
    disk.

    Raises:
        OSError: something did not reach the disk; from any write after it and on leaving.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.position = path, 0
        self._stages = [(np.frombuffer(mmap.mmap(-1, _BLOCK), np.uint8), Future[None]()) for _ in range(_STAGES)]
        for _, done in self._stages:
            done.set_result(None)

    def __enter__(self) -> WriteBehind:
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            self._direct = os.open(self._path, os.O_WRONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._direct = os.dup(self._file)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="write behind")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._thread.shutdown()  # waits for writes, whose file must not be closed under them
            if kind is None:
                for _, done in self._stages:
                    done.result()
                os.fsync(self._file)
        finally:
            os.close(self._direct)
            os.close(self._file)

    def write(self, parts: Iterable[ReadableBuffer], at: int | None = None) -> str:
        """Writes behind what was written last, or from byte `at` on; returns the checksum. A part has to hold until the
        next."""
        digest = blake3()
        self.position = self.position if at is None else at
        for part in parts:
            data = memoryview(part).cast("B")
            in_blocks(data, self.position, self._write_block, digest)
            self.position += len(data)
        return digest.hexdigest(length=manifest.DIGEST_BYTES)

    def _write_block(self, block: memoryview, offset: int) -> int:
        edge, count = -offset % _PAGE, len(block) // _PAGE * _PAGE
        if edge or not count:
            return os.pwrite(self._file, block[: edge or None], offset)
        stage, done = self._stages.pop(0)
        done.result()
        stage[:count] = np.frombuffer(block[:count], np.uint8)
        self._stages.append((stage, self._thread.submit(self._put, stage[:count].data, offset)))
        return count

    def _put(self, data: memoryview, offset: int) -> None:
        while data:
            try:
                count = os.pwrite(self._direct, data, offset)
            except OSError as error:  # a file system of larger pages, or the rest of a write that was cut within one
                if error.errno != errno.EINVAL:
                    raise
                count = os.pwrite(self._file, data, offset)
            data, offset = data[count:], offset + count
