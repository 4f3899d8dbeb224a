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
        blocks = [len(block) for block in self._blocks]
        places = _laid_out(sizes, blocks, self._used)
        self._blocks += [device.host_buffer(size) for size in blocks[len(self._blocks) :]]
        # By way of NumPy: what is written to disk is a tensor's whole storage.
        return [
            torch.from_numpy(self._blocks[number].numpy()[start : start + size])
            for (number, start), size in zip(places, sizes, strict=True)
        ]

    def free(self) -> None:
        """Allows that what was taken is given again; the blocks stay."""
        self._used = [0] * len(self._blocks)


def pinned_bytes(sizes: Sequence[int]) -> int:
    """Bytes of all blocks that `HostMemory` makes for memory of so many bytes each."""
    blocks = list[int]()
    _laid_out(sizes, blocks, [])
    return sum(blocks)


def _laid_out(sizes: Sequence[int], blocks: list[int], used: list[int]) -> list[tuple[int, int]]:
    """The block of each size, and where in it; adds to `blocks`, their bytes, and to `used`, the bytes of each in use."""
    slots: dict[int, tuple[int, int]] = {}
    aligned = [max(-(-size // _ALIGNMENT), 1) * _ALIGNMENT for size in sizes]
    missing = sum(aligned)
    for i in sorted(range(len(sizes)), key=lambda i: -aligned[i]):
        size = aligned[i]
        number = next((n for n, block in enumerate(blocks) if used[n] + size <= block), len(blocks))
        if number == len(blocks):
            blocks.append(max(1 << (size - 1).bit_length(), 1 << (missing.bit_length() - 1)))
            used.append(0)
        slots[i] = number, used[number]
        used[number] += size
        missing -= size
    return [slots[i] for i in range(len(sizes))]
