"""Host memory for what leaves the device again and again; pinned on a GPU, so that copies run at the bus's speed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.runtime import device

_ALIGNMENT = 256  # bytes


class HostMemory:
    """Blocks of bytes that are made once and used again: making them takes longer than the copies.

    torch rounds each piece of memory that it pins up to a power of two, so blocks have such sizes, and are few.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []  # uint8
        self._used: list[int] = []  # bytes of each

    def take(self, sizes: Sequence[int]) -> list[Tensor]:
        """Memory of so many bytes each, uint8, not filled, each with a storage of its own size; until `free` for one user.

        The largest come first, where they fit; equal calls after `free` give the same places. A new block has at most as much
        as is still missing, or what one size needs.
        """
        places: dict[int, Tensor] = {}
        aligned = [max(-(-size // _ALIGNMENT), 1) * _ALIGNMENT for size in sizes]
        missing = sum(aligned)
        for i in sorted(range(len(sizes)), key=lambda i: -aligned[i]):
            number = self._block(aligned[i], missing)
            start = self._used[number]
            # By way of NumPy: what is written to disk is a tensor's whole storage.
            places[i] = torch.from_numpy(self._blocks[number].numpy()[start : start + sizes[i]])
            self._used[number] += aligned[i]
            missing -= aligned[i]
        return [places[i] for i in range(len(sizes))]

    def _block(self, size: int, missing: int) -> int:
        """The first with room for `size` bytes, made where there is none."""
        for number, (block, used) in enumerate(zip(self._blocks, self._used, strict=True)):
            if used + size <= len(block):
                return number
        self._blocks.append(device.host_buffer(max(1 << (size - 1).bit_length(), 1 << (missing.bit_length() - 1))))
        self._used.append(0)
        return len(self._blocks) - 1

    def free(self) -> None:
        """What was taken may be given again; the blocks stay."""
        self._used = [0] * len(self._blocks)
