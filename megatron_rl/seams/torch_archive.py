"""torch's archives as bytes: whole, or without a tensor's values. Written for 2.13."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import lru_cache

import torch


def saved(content: object) -> bytes:
    """The bytes of `torch.save`, which reports a full disk as a RuntimeError where it writes them itself."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


class _Ends:
    """A file that keeps what is written before and after the one gap that `skip_data` leaves for the values."""

    def __init__(self) -> None:
        self.parts = [bytearray()]

    def write(self, data: bytes) -> int:
        self.parts[-1] += data
        return len(data)

    def seek(self, offset: int, whence: int) -> None:
        self.parts.append(bytearray())

    def flush(self) -> None:
        """Nothing waits to be written."""


@lru_cache(maxsize=256)
def around(dtype: str, size: Sequence[int]) -> tuple[bytes, bytes]:
    """The bytes before and after the values in the archive of a contiguous tensor (`torch.save` under `skip_data`).

    The values' CRC32 is left out (0), as by `torch.serialization.set_crc32_options(False)`; torch does not compare it.

    Args:
        dtype: as torch names it, without `torch.`.
    """
    ends = _Ends()
    with torch.serialization.skip_data():
        torch.save(torch.empty(tuple(size), dtype=getattr(torch, dtype)), ends)  # type: ignore[arg-type]
    head, tail = ends.parts
    return bytes(head), bytes(tail)
