"""Hugging Face folder -> Megatron-Core distributed checkpoint, one chunk of one tensor at a time."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import megatron_rl
from megatron_rl.checkpoint import index, manifest
from megatron_rl.checkpoint.convert import programs
from megatron_rl.checkpoint.convert.global_tensors import Memory
from megatron_rl.checkpoint.convert.jobs import Conversion, Identity, Progress, made_by
from megatron_rl.checkpoint.convert.layout import Layout, TensorChunk, chunks, global_name, padded, state_names
from megatron_rl.checkpoint.convert.reader import MegatronModel
from megatron_rl.checkpoint.convert.source import HFFolder, SourceModel, fingerprint
from megatron_rl.checkpoint.convert.write_behind import WriteBehind
from megatron_rl.checkpoint.manifest import StoredChunk
from megatron_rl.models.hf_config import unquantised
from megatron_rl.weights.check_files import check_names, check_tensors, check_tied
from megatron_rl.weights.files import (
    DTYPE_NAMES,
    DTYPES,
    INDEX,
    Bits,
    WeightSource,
    as_tensor,
    cast_bits,
    copy_companions,
    write_json,
)
from megatron_rl.weights.stacked import Opened, opened

if TYPE_CHECKING:
    from torch import Tensor

CASTS = {"bf16": "BF16", "fp32": "F32"}
_STEP = 2**24  # bytes of a chunk in memory
_STATES = "_extra_state"  # the one empty state that all names of extra states point to


@dataclass(frozen=True)
class ToMegatron(Conversion):
    """A conversion to a Megatron checkpoint."""

    hf: Path  # the source
    layout: Layout  # what the checkpoint is cut for, which also decides the padding of the vocabulary
    dtype: str = "keep"  # `keep`, `bf16` or `fp32`
    file_bytes: int = 2 * 10**9  # how large a file may grow, unless one tensor is larger
    program: str | None = None  # whose folders and files to write besides: `megatron-lm`, `bridge`, or None

    @property
    def inside(self) -> str:
        return programs.FOLDERS[self.program]

    @functools.cached_property
    def _plan(self) -> _Plan:
        return _planned(self)

    def identity(self) -> Identity:
        return {
            "to": "megatron",
            "layout": asdict(self.layout),
            "dtype": self.dtype,
            "file_bytes": self.file_bytes,
            "for": self.program,
            "version": megatron_rl.__version__,
            "source": fingerprint(self.hf, ("*.safetensors", INDEX)),
        }

    def files(self) -> list[tuple[str, int]]:
        plan = self._plan
        return [(name, sum(map(plan.nbytes, held))) for name, held in plan.files.items()]

    def write(self, file: str, folder: Path, progress: Progress) -> list[StoredChunk]:
        from megatron_rl.seams.torch_archive import around

        plan, chunks = self._plan, []
        filling = _Filling(plan.source)
        with WriteBehind(folder / file) as out:
            for chunk in plan.files[file]:
                dtype = plan.dtypes[chunk.name]
                head, tail = around(DTYPES[dtype].name, chunk.size)
                offset = out.position
                digest = out.write(chain([head], (part.data for part in filling.parts(chunk, dtype)), [tail]))
                chunks.append(StoredChunk(chunk.name, chunk.start, file, offset, out.position - offset, digest))
                progress(plan.nbytes(chunk))
        plan.files_read.check_begun()
        return chunks

    def finish(self, folder: Path, chunks: Sequence[StoredChunk]) -> None:
        plan = self._plan
        state = _write_state(folder, f"__{len(plan.files)}_0.distcp")
        _write_index(folder, plan, chunks, state)
        dtype = DTYPES[plan.dtypes[global_name(plan.model.family.embedding)]].name
        programs.write_files(self.program, folder, plan.model, self.layout, dtype)
        manifest.write_json(folder / "metadata.json", index.BACKEND)
        copy_companions(self.hf, folder)
        if "quantization_config" in plan.model.hf_config:
            write_json(folder / "config.json", unquantised(plan.model.hf_config))
        else:
            (folder / "config.json").write_bytes((self.hf / "config.json").read_bytes())
        tensors = {
            chunk.name: manifest.TensorInfo(chunk.shape, DTYPES[plan.dtypes[chunk.name]].name)
            for held in plan.files.values()
            for chunk in held
        }
        about = made_by(self, plan.model.family.name) | {
            "layout": {
                **asdict(self.layout),
                "vocabulary": plan.model.dims["vocab"],
                "padded_vocabulary": padded(plan.model.dims, self.layout.tensor)["padded_vocab"],
            }
        }
        manifest.write(folder, about, tensors | {_STATES: manifest.TensorInfo((), "object")}, [*chunks, state])

    def enclose(self, root: Path) -> None:
        programs.write_trackers(self.program, root)

    def names(self) -> list[str]:
        plan = self._plan
        return [t.name for rule in plan.model.weights() for t in rule.hf]

    def expected(self, name: str, start: int, stop: int) -> Tensor:
        """Expected rows [start, stop) of a Hugging Face tensor, read back from the result."""
        source = self._plan.source
        dtype = CASTS.get(self.dtype) or source.dtype(name)
        values = np.empty((stop - start, *source.shape(name)[1:]), DTYPES[source.dtype(name)].bits)
        source.read_into(values, name, start)
        return as_tensor(cast_bits(values, source.dtype(name), dtype), dtype)

    def result(self, target: Path) -> WeightSource:
        folder = target / self.inside
        return MegatronModel(folder, SourceModel.read(folder))


@dataclass(frozen=True)
class _Plan:
    model: SourceModel
    files_read: HFFolder
    source: Opened  # these by the names of rules, none quantised
    files: dict[str, list[TensorChunk]]
    dtypes: dict[str, str]  # by global name, as safetensors names them

    def nbytes(self, chunk: TensorChunk) -> int:
        return chunk.numel * DTYPES[self.dtypes[chunk.name]].itemsize


def _planned(task: ToMegatron) -> _Plan:
    """Checks the source against its config, and divides the checkpoint into files.

    Raises:
        ValueError: the source is not what its config.json says, or the layout is impossible for it.
    """
    model, files_read = SourceModel.read(task.hf), HFFolder(task.hf)
    source = opened(files_read, model.family)
    task.layout.check(model)
    if task.program is not None:
        programs.check(model)
    check_names(source, model)
    for rule in model.weights():
        check_tensors(rule, source, model)
    check_tied(source, model)
    everything = list(chunks(model, task.layout))
    dtypes = _dtypes(everything, source, model, task.dtype)
    # A file is read by the ranks of one pipeline stage and one expert-parallel rank.
    everything.sort(key=lambda chunk: (chunk.stage, chunk.expert_rank))
    files: list[list[TensorChunk]] = []
    size, last = 0, None
    for chunk in everything:
        nbytes, group = chunk.numel * DTYPES[dtypes[chunk.name]].itemsize, (chunk.stage, chunk.expert_rank)
        if group != last or size + nbytes > task.file_bytes:
            files.append([])
            size, last = 0, group
        files[-1].append(chunk)
        size += nbytes
    return _Plan(model, files_read, source, {f"__{n}_0.distcp": held for n, held in enumerate(files)}, dtypes)


def _dtypes(chunks: Sequence[TensorChunk], source: WeightSource, model: SourceModel, dtype: str) -> dict[str, str]:
    """The dtype of every global tensor.

    Raises:
        ValueError: tensors that become one global tensor differ, or one is neither of config.json's dtype nor fp32.
    """
    if dtype in CASTS:
        return {chunk.name: CASTS[dtype] for chunk in chunks}
    dtypes: dict[str, tuple[str, str]] = {}  # global name -> dtype, the tensor that has it
    for chunk in chunks:
        for tensor in chunk.rule.hf:
            kind = source.dtype(tensor.name)
            first, other = dtypes.setdefault(chunk.name, (kind, tensor.name))
            if first != kind:
                raise ValueError(
                    f"{tensor.name} in {source.file_of(tensor.name)} has dtype {kind}, but {other}, part of the same "
                    f"Megatron parameter, has {first}; if that is meant, choose one with --dtype"
                )
    declared = str(model.hf_config.get("dtype") or model.hf_config.get("torch_dtype") or "")
    config_dtype = DTYPE_NAMES.get(declared)
    if len({kind for kind, _ in dtypes.values()}) > 1 and config_dtype is not None:
        for kind, name in dtypes.values():
            if kind not in (config_dtype, "F32"):
                raise ValueError(
                    f"{name} in {source.file_of(name)} has dtype {kind}, but config.json says {declared}; "
                    "if that is meant, choose a dtype for all with --dtype"
                )
    return {name: kind for name, (kind, _) in dtypes.items()}


class _Filling:
    """Chunks from a source's tensors, one after the other in the same memory."""

    def __init__(self, source: Opened) -> None:
        self._source, self._memory = source, Memory()
        self._columns, self._columns_of = Memory(), ""

    def parts(self, chunk: TensorChunk, dtype: str) -> Iterator[Bits]:
        """The values of a chunk, some rows at a time; they hold until the next are asked for."""
        bits, rule = DTYPES[dtype].bits, chunk.rule
        rows, *rest = chunk.matrix
        ranges = [(rule.hf[piece.tensor].name, piece.start, piece.length) for piece in chunk.slices]
        if rule.dim == 1:
            [(name, first, columns)] = ranges
            kind = self._source.dtype(name)
            ranges = [(name, 0, rows)]
            if chunk.matrix != self._source.shape(name):  # other chunks are other columns of the same matrix
                for at, count in _steps(rows, rest, bits):
                    block = self._memory.array((count, columns), DTYPES[kind].bits)
                    block[...] = self._matrix(name)[at : at + count, first : first + columns]
                    yield cast_bits(block, kind, dtype)
                return
        for name, first, length in ranges:
            kind = self._source.dtype(name)
            for at, count in _steps(length, rest, bits):
                block = self._memory.array((count, *rest), DTYPES[kind].bits)
                self._source.read_into(block, name, first + at)
                yield cast_bits(block, kind, dtype)
        padding = rows - sum(length for _, _, length in ranges)
        if padding:
            yield np.zeros((padding, *rest), bits)

    def _matrix(self, name: str) -> Bits:
        matrix = self._columns.array(self._source.shape(name), DTYPES[self._source.dtype(name)].bits)
        if name != self._columns_of:
            self._source.read_into(matrix, name)
            self._columns_of = name
        return matrix


def _steps(rows: int, rest: Sequence[int], bits: np.dtype[np.unsignedinteger]) -> Iterator[tuple[int, int]]:
    """Rows in stretches of `_STEP` bytes: first, count."""
    step = max(1, _STEP // (math.prod(rest) * bits.itemsize))
    return ((at, min(step, rows - at)) for at in range(0, rows, step))


def _write_state(folder: Path, file: str) -> StoredChunk:
    """The empty extra state."""
    from megatron_rl.seams.torch_archive import saved

    data = saved([None])
    (folder / file).write_bytes(data)
    return StoredChunk(_STATES, (), file, 0, len(data), manifest.digest(data))


def _write_index(folder: Path, plan: _Plan, pieces: Sequence[StoredChunk], state: StoredChunk) -> None:
    """Megatron-Core's index: every global tensor under each of its names, and the extra states."""
    tensors: dict[str, index.GlobalTensor] = {}
    places = {(p.name, p.start): p for p in pieces}
    for chunk in (chunk for held in plan.files.values() for chunk in held):
        place = places[chunk.name, chunk.start]
        for name in (chunk.name, *chunk.aliases):
            entry = tensors.setdefault(name, index.GlobalTensor(chunk.shape, DTYPES[plan.dtypes[chunk.name]].name, []))
            entry.chunks.append(index.Stored(chunk.start, chunk.size, place.file, place.offset, place.length))
    states = state_names(plan.model)
    index.write(folder, tensors, dict.fromkeys(states, (state.file, state.offset, state.length)))
