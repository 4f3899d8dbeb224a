"""Weights that files have in block-wise FP8 (`base.block_fp8`), each as bf16: value times scale in fp32, then rounded, which
are transformers' steps too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.base.block_fp8 import BLOCK, DTYPE, SCALE, dequantise, scales_shape
from megatron_rl.weights.files import Bits, SafetensorsFolder, WeightSource, as_bits

if TYPE_CHECKING:
    from torch import Tensor

_AT_ONCE = 2**24  # numbers in fp32


def unscaled(files: SafetensorsFolder) -> SafetensorsFolder | Unscaled:
    """The folder, its weights in block-wise FP8 as bf16 where it has such."""
    return Unscaled(files) if any(name.endswith(SCALE) for name in files.names()) else files


class Unscaled(WeightSource):
    """A folder with tensors in FP8, [rows, columns] or [experts, rows, columns], beside their scales, which get no names of
    their own here. Each is read slice by slice, and blocks that a slice cuts with their scale.

    Raises:
        ValueError: (when a dtype is asked for) a tensor that has scales is not in FP8, or they are not those of its blocks.
    """

    def __init__(self, files: SafetensorsFolder) -> None:
        self.folder, self._files = files.folder, files
        stored = files.names()
        self._scaled = {name.removesuffix(SCALE) for name in stored if name.endswith(SCALE)} & stored
        self._names = stored - {name + SCALE for name in self._scaled}

    def names(self) -> set[str]:
        return set(self._names)

    def file_of(self, name: str) -> Path:
        return self._files.file_of(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files.shape(name)

    def dtype(self, name: str) -> str:
        if name not in self._scaled:
            return self._files.dtype(name)
        self._check(name)
        return "BF16"

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        if name not in self._scaled:
            return self._files.read(name, dim, start, stop)
        import torch

        shape = list(self.shape(name))
        stop = min(stop, shape[dim])
        shape[dim] = stop - start
        out = torch.empty(shape, dtype=torch.bfloat16)
        at = 0
        for numbers in self._rows(name, start, stop) if dim == 0 else self._columns(name, start, stop):
            out[at : at + len(numbers)] = numbers
            at += len(numbers)
        return out

    def read_into(self, out: Bits, name: str, start: int = 0) -> None:
        """Fills `out`, contiguous, with a tensor's rows from `start` on."""
        if name in self._scaled:
            out[...] = as_bits(self.read(name, 0, start, start + len(out)))
        else:
            self._files.read_into(out, name, start)

    def _rows(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        """Rows (or experts) in fp32, some at a time, from the first of a block on, where that is not the slice's."""
        shape = self.shape(name)
        block = BLOCK if len(shape) == 2 else 1
        step = _step(shape, block)
        for aligned in range(start - start % block, stop, step):
            end = min(aligned + step, stop)
            scales = self._files.read(name + SCALE, 0, aligned // block, -(-end // block))
            yield dequantise(self._files.read(name, 0, aligned, end), scales)[max(start - aligned, 0) :]

    def _columns(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        aligned = start - start % BLOCK
        values = self._files.read(name, 1, aligned, stop)
        scales = self._files.read(name + SCALE, 1, aligned // BLOCK, -(-stop // BLOCK))
        step = _step(tuple(values.shape), BLOCK)
        for part, of_part in zip(values.split(step), scales.split(step // BLOCK), strict=True):
            yield dequantise(part, of_part)[:, start - aligned :]

    def _check(self, name: str) -> None:
        shape, scales = self._files.shape(name), self._files.shape(name + SCALE)
        kinds = self._files.dtype(name), self._files.dtype(name + SCALE)
        blocks = (*shape[:-2], *scales_shape(shape[-2:])) if len(shape) in (2, 3) else None
        if kinds != (DTYPE, "F32") or scales != blocks:
            raise ValueError(
                f"{name} in {self.file_of(name)} is {shape} of {kinds[0]} and {name}{SCALE} {scales} of {kinds[1]}: "
                f"block-wise FP8 has {DTYPE}, and an F32 for each {BLOCK} x {BLOCK} of it"
            )


def _step(shape: tuple[int, ...], block: int) -> int:
    """Rows (or experts) to dequantise at once: whole blocks."""
    each = block
    for size in shape[1:]:
        each *= size
    return max(_AT_ONCE // max(each, 1), 1) * block
