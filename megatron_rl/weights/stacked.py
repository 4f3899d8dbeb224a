"""Experts that files have in one tensor (`models.expert_stacks`), as each one's matrices, which rules name, and back.

Those in MXFP4 (OCP Microscaling Formats 1.0: blocks of 32 four-bit numbers with a power of two each) are read as bf16, which
has every product of the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from megatron_rl.models import text_only
from megatron_rl.models.expert_stacks import ExpertPart, Stacking
from megatron_rl.models.family import Family, Model
from megatron_rl.weights.block_scaled import Unscaled, unscaled
from megatron_rl.weights.files import DTYPES, Bits, SafetensorsFolder, WeightSource, as_tensor

if TYPE_CHECKING:
    from torch import Tensor

_BLOCKS, _SCALES = "_blocks", "_scales"  # behind the name of a tensor that is in MXFP4
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and their negatives, with the fourth bit


class ReadsBits(Protocol):
    """A source of weights that reads into memory, without torch."""

    folder: Path

    def names(self) -> set[str]: ...
    def file_of(self, name: str) -> Path: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> str: ...
    def read_into(self, out: Bits, name: str, dim: int = 0, start: int = 0) -> None: ...


def opened(files: SafetensorsFolder, family: Family) -> Opened:
    """A folder's tensors under the names of rules, none quantised, without what its models have beside the
    language model."""
    stacking = family.stacking
    if family.is_inside:
        files.rename(text_only.names_read(files.names()))
        published = Stacking(transposed=False, interleaved=False)
        if any(published.names(name, 1) for name in files.names()):
            stacking = published
    return unscaled(files) if stacking is None else Unstacked(unscaled(files), stacking)


class Unstacked(WeightSource):
    """A folder whose experts are stacked, under the names of each expert's matrices; one expert is in memory at a time.

    Raises:
        ValueError: a tensor's blocks or scales are no bytes, or do not go together.
    """

    def __init__(self, files: SafetensorsFolder | Unscaled, stacking: Stacking) -> None:
        stacking = _as_stored(files, stacking)
        self.folder, self._files, self._stacking = files.folder, files, stacking
        self._read: tuple[str, int, Bits] | None = None  # the last expert: tensor, number, [out, in]
        stored = files.names()
        quantised = (name.removesuffix(_BLOCKS) for name in stored if name.endswith(_BLOCKS))
        self._in_mxfp4 = {name for name in quantised if name + _SCALES in stored}
        stored -= {name + end for name in self._in_mxfp4 for end in (_BLOCKS, _SCALES)}
        self._names = set[str]()
        for name in stored | self._in_mxfp4:
            if not stacking.names(name, 1):
                self._names.add(name)
                continue
            self._check(name)
            self._names.update(stacking.names(name, self._whole_shape(name)[0]))

    def names(self) -> set[str]:
        return set(self._names)

    def file_of(self, name: str) -> Path:
        stacked = self._stacked(name)
        return self._files.file_of(stacked + _BLOCKS if stacked in self._in_mxfp4 else stacked)

    def dtype(self, name: str) -> str:
        stacked = self._stacked(name)
        return "BF16" if stacked in self._in_mxfp4 else self._files.dtype(stacked)

    def shape(self, name: str) -> tuple[int, ...]:
        part = self._stacking.part(name)
        if part is None:
            return self._files.shape(name)
        _, outputs, *inputs = self._whole_shape(part.stacked)
        return (outputs if part.half is None else -(-outputs // 2), *inputs)

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        part = self._stacking.part(name)
        if part is None:
            return self._files.read(name, dim, start, stop)
        values = self._matrix(part)
        chosen = values[start:stop] if dim == 0 else values[:, start:stop]
        return as_tensor(np.array(chosen, order="C"), self.dtype(name))

    def read_into(self, out: Bits, name: str, start: int = 0) -> None:
        """Fills `out`, contiguous, with a tensor's rows from `start` on."""
        part = self._stacking.part(name)
        if part is None:
            self._files.read_into(out, name, start)
        else:
            out[...] = self._matrix(part)[start : start + len(out)]

    def _stacked(self, name: str) -> str:
        part = self._stacking.part(name)
        return name if part is None else part.stacked

    def _whole_shape(self, stacked: str) -> tuple[int, ...]:
        """[experts, out, in] (of biases [experts, out]) of a stacked tensor; any other's own."""
        if stacked in self._in_mxfp4:
            experts, outputs, blocks, half = self._files.shape(stacked + _BLOCKS)
            return (experts, outputs, blocks * half * 2)
        shape = self._files.shape(stacked)
        is_matrix = len(shape) == 3 and self._stacking.names(stacked, 1)
        return (shape[0], shape[2], shape[1]) if is_matrix and self._stacking.transposed else shape

    def _check(self, name: str) -> None:
        if name in self._in_mxfp4:
            self._check_mxfp4(name)
            return
        shape, sizes = self._files.shape(name), 2 if name.endswith("_bias") else 3
        if len(shape) != sizes:
            raise ValueError(f"{name} in {self._files.file_of(name)} has shape {shape}, expected {sizes} sizes")
        if len(self._stacking.names(name, 1)) == 2 and self._whole_shape(name)[1] % 2:
            raise ValueError(
                f"{name} in {self._files.file_of(name)} has shape {shape}: gate and up projection have no equal halves"
            )

    def _check_mxfp4(self, name: str) -> None:
        blocks, scales = (self._files.shape(name + end) for end in (_BLOCKS, _SCALES))
        kinds = {self._files.dtype(name + end) for end in (_BLOCKS, _SCALES)}
        if kinds != {"U8"} or len(blocks) != 4 or blocks[:3] != scales or blocks[3] != 16:
            raise ValueError(
                f"{name}{_BLOCKS} in {self._files.file_of(name + _BLOCKS)} is {blocks} and {name}{_SCALES} {scales}, of "
                f"{', '.join(sorted(kinds))}: MXFP4 has [experts, out, in / 32, 16] and [experts, out, in / 32] of U8"
            )

    def _matrix(self, part: ExpertPart) -> Bits:
        """[out, in] of one matrix, or [out] of a bias; a view."""
        if self._read is None or self._read[:2] != part[:2]:
            self._read = (part.stacked, part.expert, self._expert(part.stacked, part.expert))
        return half_of(self._read[2], part.half, self._stacking)

    def _expert(self, stacked: str, expert: int) -> Bits:
        if stacked in self._in_mxfp4:
            blocks, scales = (self._row(stacked + end, expert) for end in (_BLOCKS, _SCALES))
            return dequantised(blocks, scales)
        values = self._row(stacked, expert)
        return values.T if self._stacking.transposed and values.ndim == 2 else values

    def _row(self, name: str, number: int) -> Bits:
        out = np.empty((1, *self._files.shape(name)[1:]), DTYPES[self._files.dtype(name)].bits)
        self._files.read_into(out, name, number)
        return out[0]


Opened = SafetensorsFolder | Unscaled | Unstacked  # what reads rows into memory


def _as_stored(files: WeightSource, stacking: Stacking) -> Stacking:
    """The stacking with matrices as these files have them: transformers 5.19 saves as [experts, out, in] what Qwen3-VL has
    published as [experts, in, out], and reads both. Which it is follows from the sizes, since one is twice another."""
    for name in files.names():
        down = name.removesuffix("gate_up_proj") + "down_proj"
        if name.endswith("experts.gate_up_proj") and down in files.names():
            outputs, inputs = files.shape(name)[-2:]
            return replace(stacking, transposed=(2 * files.shape(down)[-1], files.shape(down)[-2]) != (outputs, inputs))
    return stacking


def half_of[Values: (Bits, "Tensor")](whole: Values, half: int | None, stacking: Stacking) -> Values:
    """The gate's (0) or the up projection's (1) rows of an expert's matrix [out, in], or numbers of its bias: a view."""
    if half is None:
        return whole
    if stacking.interleaved:
        return whole[half::2]
    size = whole.shape[0] // 2
    return whole[half * size : (half + 1) * size]


def dequantised(blocks: Bits, scales: Bits) -> Bits:
    """Bits of bf16 [rows, 32 * blocks] from MXFP4: bytes [rows, blocks, 16], of which each has two numbers, the first in its
    low half, and [rows, blocks] exponents, biased by 127."""
    signed = np.array((*_E2M1, *(-value for value in _E2M1)), np.float32)
    with np.errstate(over="ignore"):
        table = np.ldexp(signed, np.arange(256)[:, None] - 127)  # exact, but where it overflows
    bits = (table.view(np.uint32) >> 16).astype(np.uint16)  # bf16 is the upper half, and the lower one is zero
    numbers = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    values: Bits = bits[scales[..., None], numbers]
    return values.reshape(len(blocks), -1)


class Stacked(WeightSource):
    """A model's weights under the names of its files, in which experts are stacked, from a source that has each expert's."""

    def __init__(self, source: ReadsBits, model: Model, stacking: Stacking) -> None:
        self.folder, self._source, self._stacking, self._experts = source.folder, source, stacking, model.expert_count
        self.tensors = {}
        for name in (tensor.name for rule in model.weights() for tensor in rule.hf):
            part, shape = stacking.part(name), source.shape(name)
            if part is not None:
                shape = stacking.stacked_shape(shape, part, self._experts)
            self.tensors.setdefault(name if part is None else part.stacked, (shape, source.dtype(name)))

    def file_of(self, name: str) -> Path:
        return self._source.file_of((self._stacking.names(name, self._experts) or [name])[0])

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        whole = np.empty(self.shape(name), DTYPES[self.dtype(name)].bits)
        self.read_into(whole, name)
        return as_tensor(whole, self.dtype(name)).narrow(dim, start, stop - start)

    def read_into(self, out: Bits, name: str, dim: int = 0, start: int = 0) -> None:
        """Fills `out`, contiguous, with entries from `start` along `dim` on; of stacked experts `dim` is 0."""
        parts = self._stacking.names(name, self._experts)
        if not parts:
            self._source.read_into(out, name, dim, start)
            return
        each = len(parts) // self._experts
        for number in range(len(out)):
            for own in parts[(start + number) * each : (start + number + 1) * each]:
                values = np.empty(self._source.shape(own), out.dtype)
                self._source.read_into(values, own)
                place(out[number], values, own, self._stacking)

    def parts(self, name: str, memory: object) -> Iterator[Bits]:
        """A whole tensor, of stacked experts one at a time. `memory` is for sources that hold larger parts."""
        shape = self.shape(name)
        rows = 1 if self._stacking.names(name, self._experts) else shape[0]
        for first in range(0, shape[0], rows):
            out = np.empty((rows, *shape[1:]), DTYPES[self.dtype(name)].bits)
            self.read_into(out, name, 0, first)
            yield out


def place[Values: (Bits, "Tensor")](expert: Values, values: Values, name: str, stacking: Stacking) -> None:
    """Puts one expert's matrix or bias where it belongs in that expert's part of a stacked tensor."""
    part = stacking.part(name)
    assert part is not None, "stacked tensors have experts' parts only"
    whole = expert.T if stacking.transposed and not part.is_bias else expert
    half_of(whole, part.half, stacking)[...] = values


def stacked(
    weights: Iterable[tuple[str, Tensor]], stacking: Stacking | None, experts: int
) -> Iterator[tuple[str, Tensor]]:
    """(name in rules, tensor) pairs as (name in files, tensor) pairs; a layer's experts come when all of them are there."""
    whole_tensors: dict[str, tuple[Tensor, set[str]]] = {}
    for name, values in weights:
        part = None if stacking is None else stacking.part(name)
        if stacking is None or part is None:
            yield name, values
            continue
        if part.stacked not in whole_tensors:
            whole = values.new_empty(stacking.stacked_shape(tuple(values.shape), part, experts))
            whole_tensors[part.stacked] = (whole, set(stacking.names(part.stacked, experts)))
        whole, missing = whole_tensors[part.stacked]
        place(whole[part.expert], values, name, stacking)
        missing.remove(name)
        if not missing:
            del whole_tensors[part.stacked]
            yield part.stacked, whole


def one_by_one(weights: Iterable[tuple[str, Tensor]], stacking: Stacking | None) -> Iterator[tuple[str, Tensor]]:
    """The same, where gate and up projection alternate each expert's slice of a stacked tensor by itself, its number in its
    name: as vLLM's GPT-OSS takes them."""
    if stacking is None or not stacking.interleaved:
        yield from weights
        return
    before: list[tuple[str, Tensor]] = []  # the gate projection, until the up projection comes
    for name, values in weights:
        part = stacking.part(name)
        if part is None:
            yield name, values
        elif part.half == 0:
            before.append((name, values))
        else:
            slice_of = values.new_empty(stacking.stacked_shape(tuple(values.shape), part, 1)[1:])
            for own, of_part in (*before, (name, values)):
                place(slice_of, of_part, own, stacking)
            before.clear()
            layer, _, last = part.stacked.rpartition(".")
            yield f"{layer}.{part.expert}.{last}", slice_of
