"""Flushing a large file while it is being written, without filling the page cache."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_STRETCH = 64 * 2**20  # bytes between two flushes


class WriteBehind:
    """A new file that is flushed in the background as it grows, and whose memory in the page cache is given back.

    Left to itself the kernel keeps a copy of all that is written: a model's worth of memory, which in a container counts
    against its limit and has to be found first; and the disk has most of its work at the end. On leaving, all is on the disk.

    Raises:
        OSError: something did not reach the disk; from any write after it and on leaving.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._position, self._waiting = path, 0, 0
        self._flush: Future[None] | None = None

    def __enter__(self) -> WriteBehind:
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="write behind")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._thread.shutdown()  # waits for a flush, whose file must not be closed under it
            if kind is None:
                self._join()
                os.fsync(self._file)
                os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(self._file)

    def write(self, data: ReadableBuffer) -> int:
        """Behind what the last `write` wrote."""
        count = self.write_at(data, self._position)
        self._position += count
        return count

    def write_at(self, data: ReadableBuffer, offset: int) -> int:
        view = memoryview(data).cast("B")
        count = len(view)
        while view:
            written = os.pwrite(self._file, view[:_STRETCH], offset)
            view, offset = view[written:], offset + written
            self._waiting += written
            if self._waiting >= _STRETCH:
                self._join()
                self._flush, self._waiting = self._thread.submit(_flush, self._file), 0
        return count

    def flush(self) -> None:
        """Nothing waits in this process."""

    def _join(self) -> None:
        if self._flush is not None:
            self._flush.result()


def _flush(file: int) -> None:
    os.fdatasync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
