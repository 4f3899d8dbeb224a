"""Device memory given up for a while: its contents wait in host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, UntypedStorage

from megatron_rl.runtime import device

_BLOCK = 2**28  # bytes of pinned memory made at once; torch rounds what it pins up to a power of two
_ALIGNMENT = 256  # bytes


class Offload:
    """Empties tensors' memory into host memory, and fills it again. The tensors, and views of them, stay the same objects.

    The host memory is made once and used again, pinned on a GPU. Copies run on a stream of their own: `back` does not wait
    for them, `wait` makes the current stream do so. On a CPU the same happens in order.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._used = 0  # bytes of them
        self._away: list[tuple[UntypedStorage, list[Tensor]]] = []  # with the pieces of host memory that hold it
        self._stream = torch.cuda.Stream() if device.has_gpu() else None

    def out(self, tensors: Iterable[Tensor]) -> None:
        """Moves all memory that the tensors lie in to the host; of those on this process's device, and once each."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.device == device.device()}
        storages.pop(0, None)  # empty, or away already
        with self._copying():
            for storage in storages.values():
                host = list(self._take(storage.nbytes()))
                for piece, part in zip(host, _split(storage, host), strict=True):
                    piece.copy_(part, non_blocking=True)
                self._away.append((storage, host))
        device.synchronize()
        for storage, _ in self._away:
            storage.resize_(0)

    def back(self) -> None:
        """Starts to fill what `out` emptied. Whoever reads it calls `wait` before."""
        for storage, host in self._away:
            storage.resize_(sum(piece.nbytes for piece in host))
        with self._copying():
            for storage, host in self._away:
                for piece, part in zip(host, _split(storage, host), strict=True):
                    part.copy_(piece, non_blocking=True)
        self._away, self._used = [], 0  # the next `out` writes it on the same stream, so after these copies

    def _take(self, count: int) -> Iterator[Tensor]:
        """The next `count` bytes of host memory, block by block."""
        self._used = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        while count:
            number, at = divmod(self._used, _BLOCK)
            if number == len(self._blocks):
                self._blocks.append(device.host_buffer((_BLOCK,), torch.uint8))
            piece = self._blocks[number][at : at + count]
            yield piece
            self._used, count = self._used + piece.nbytes, count - piece.nbytes

    def wait(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _copying(self) -> contextlib.AbstractContextManager[object]:
        if self._stream is None:
            return contextlib.nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)


def _split(storage: UntypedStorage, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
    """The bytes of a storage, cut as the pieces are."""
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return whole.split([piece.nbytes for piece in pieces])
