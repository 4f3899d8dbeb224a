"""Checksums of boxes of weights, computed on the device that holds them, and independent of where they lie in memory.

A box is read as a matrix of integers (its bits). Its checksum is two numbers, modulo 2^64: the sums of its rows and the sums
of its columns, each weighted by place. They see any one number that changed, rows or columns in another order, other
contents. They do not see several changes that leave every row's and every column's sum as it was, as four numbers at the
corners of a rectangle of which two grow and two shrink by the same. Experts are matrices of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_MULTIPLIER = -7046029254386353131  # odd, so weights are: no change of a single number is multiplied away
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WORD = 8  # bytes; rows that are whole words are summed as such, without a copy


class Checksums:
    """Checksums of one box after the other."""

    def __init__(self) -> None:
        self._lines: list[Tensor] = []  # int64: per box the sums of all rows, then of all columns
        self._lengths: list[int] = []  # of each of these two
        self._known: dict[tuple[int, ...], Tensor] = {}

    def add(self, matrices: Sequence[Tensor], integer: torch.dtype) -> None:
        """A box: matrices [..., rows, columns], one after the other. `integer`: what its rows are read as; the same wherever
        the box is compared."""
        rows, columns = [], []
        for matrix in matrices:
            if matrix.storage_offset() * matrix.element_size() % integer.itemsize:
                matrix = matrix.clone()
            bits = (matrix if matrix.dim() > 1 else matrix[:, None]).view(integer)
            rows.append(bits.sum(-1, dtype=torch.int64).flatten())
            columns.append(bits.sum(-2, dtype=torch.int64).flatten())
        for lines in (rows, columns):
            self._lines += lines
            self._lengths.append(sum(map(len, lines)))

    def take(self) -> Tensor:
        """Checksums of the boxes since the last call; int64 [boxes, 2]."""
        lines, lengths = torch.cat(self._lines), tuple(self._lengths)
        self._lines, self._lengths = [], []
        if lengths not in self._known:
            self._known[lengths] = torch.tensor(lengths, device=lines.device)
        each = self._known[lengths]
        group = torch.arange(len(lengths), device=lines.device).repeat_interleave(each, output_size=len(lines))
        place = torch.arange(len(lines), device=lines.device) - (each.cumsum(0) - each)[group]
        weighted = lines * ((2 * place + 1) * _MULTIPLIER)
        return lines.new_zeros(len(lengths)).index_add_(0, group, weighted).view(-1, 2)


def digest(tensors: Iterable[Tensor]) -> bytes:
    """16 bytes that tell whether tensors of one device hold the same bits, one after the other."""
    sums, taken = Checksums(), hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        if tensor.numel():
            sums.add([tensor.detach().contiguous()], INTEGERS[tensor.element_size()])
            taken.update(sums.take().cpu().numpy().tobytes())
    return taken.digest()
