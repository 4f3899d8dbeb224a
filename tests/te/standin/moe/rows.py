"""Rows of each expert, padded to the multiple that FP8 needs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def fused_multi_row_padding(input: Tensor, output: Tensor, rows: Sequence[int], padded_rows: Sequence[int]) -> None:
    """Each part of `rows` rows into one of `padded_rows`, filled up with zeros."""
    output.zero_()
    for source, target in zip(input.split(list(rows)), output.split(list(padded_rows)), strict=True):
        target[: len(source)].copy_(source)


def fused_multi_row_unpadding(input: Tensor, output: Tensor, padded_rows: Sequence[int], rows: Sequence[int]) -> None:
    """Undoes it."""
    for source, target in zip(input.split(list(padded_rows)), output.split(list(rows)), strict=True):
        target.copy_(source[: len(target)])
