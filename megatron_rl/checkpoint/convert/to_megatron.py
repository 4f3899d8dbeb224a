"""Hugging Face folder -> Megatron-Core distributed checkpoint, one chunk of one tensor at a time."""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import megatron_rl
from megatron_rl.checkpoint import manifest
from megatron_rl.checkpoint.convert import programs
from megatron_rl.checkpoint.convert.jobs import Identity, Progress, made_by
from megatron_rl.checkpoint.convert.layout import Layout, TensorChunk, aliases, chunks, global_name, padded, state_names
from megatron_rl.checkpoint.convert.reader import MegatronModel
from megatron_rl.checkpoint.convert.source import HFFolder, SourceModel, fingerprint
from megatron_rl.checkpoint.convert.write_behind import WriteBehind
from megatron_rl.checkpoint.manifest import Hashing, StoredChunk
from megatron_rl.models.export import copy_companions
from megatron_rl.models.files import DTYPE_NAMES, DTYPES, INDEX, WeightSource
from megatron_rl.models.load import check_names, check_tensors, check_tied
from megatron_rl.seams import torch_dist

CASTS = {"bf16": torch.bfloat16, "fp32": torch.float32}
_STATES = "_extra_state"  # the one empty state that all names of extra states point to


@dataclass(frozen=True)
class ToMegatron:
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

    def __getstate__(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

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
        plan = self._plan
        pieces, checked = [], set()
        matrix = functools.lru_cache(1)(lambda name: plan.source.read(name, 0, 0, plan.source.shape(name)[0]))
        with WriteBehind(folder / file) as raw:
            out = Hashing(raw)
            for chunk in plan.files[file]:
                for tensor in chunk.rule.hf:
                    if tensor.name not in checked:
                        plan.source.check(tensor.name)
                        checked.add(tensor.name)
                offset = out.position
                out.begin()
                values = assemble(chunk, plan.source, matrix).to(plan.dtypes[chunk.name]).view(chunk.size)
                try:
                    torch.save(values, cast(BinaryIO, out))
                except RuntimeError as error:  # torch's writer does not say why
                    raise (out.failure or error) from None
                pieces.append(StoredChunk(chunk.name, chunk.start, file, offset, out.position - offset, out.digest()))
                progress(plan.nbytes(chunk))
        return pieces

    def finish(self, folder: Path, pieces: Sequence[StoredChunk]) -> None:
        plan = self._plan
        state = _write_state(folder, f"__{len(plan.files)}_0.distcp")
        (folder / ".metadata").write_bytes(pickle.dumps(_index(plan, pieces, state)))
        dtype = plan.dtypes[global_name(plan.model.family.embedding)]
        torch.save(programs.common_state(self.program, plan.model, self.layout, dtype), folder / "common.pt")
        programs.write_beside(self.program, folder, plan.model, self.layout, dtype)
        manifest.write_json(folder / "metadata.json", torch_dist.BACKEND)
        copy_companions(self.hf, folder)
        (folder / "config.json").write_bytes((self.hf / "config.json").read_bytes())
        tensors = {
            chunk.name: manifest.TensorInfo(chunk.shape, str(plan.dtypes[chunk.name]).removeprefix("torch."))
            for held in plan.files.values()
            for chunk in held
        }
        about = made_by(self, plan.model.family.name) | {
            "layout": {
                **asdict(self.layout),
                "vocabulary": plan.model.description.dims["vocab"],
                "padded_vocabulary": padded(plan.model.description, self.layout.tensor)["padded_vocab"],
            }
        }
        manifest.write(folder, about, tensors | {_STATES: manifest.TensorInfo((), "object")}, [*pieces, state])

    def enclose(self, root: Path) -> None:
        programs.write_trackers(self.program, root)

    # ------------------------------------------------------------------------------------------------- verification
    def names(self) -> list[str]:
        plan = self._plan
        return [t.name for rule in plan.model.family.weights(plan.model.description) for t in rule.hf]

    def expected(self, name: str, start: int, stop: int) -> Tensor:
        """Expected rows [start, stop) of a Hugging Face tensor, read back from the result."""
        source = self._plan.source
        return source.read(name, 0, start, stop).to(CASTS.get(self.dtype) or DTYPES[source.dtype(name)])

    def result(self, target: Path) -> WeightSource:
        folder = target / self.inside
        model = SourceModel.read(folder)
        return MegatronModel(folder, model.family, model.description)


@dataclass(frozen=True)
class _Plan:
    model: SourceModel
    source: HFFolder
    files: dict[str, list[TensorChunk]]
    dtypes: dict[str, torch.dtype]  # by global name

    def nbytes(self, chunk: TensorChunk) -> int:
        return chunk.numel * self.dtypes[chunk.name].itemsize


def _planned(task: ToMegatron) -> _Plan:
    """Checks the source against its config, and divides the checkpoint into files.

    Raises:
        ValueError: the source is not what its config.json says, or the layout is impossible for it.
    """
    model, source = SourceModel.read(task.hf), HFFolder(task.hf)
    task.layout.check(model.family, model.description)
    check_names(source, model.family, model.description)
    for rule in model.family.weights(model.description):
        check_tensors(rule, source, model.description.dims)
    if model.description.tied and model.family.output.hf[0].name in source.names():
        check_tied(source, model.family)
    everything = list(chunks(model.family, model.description, task.layout))
    dtypes = _dtypes(everything, source, model, task.dtype)
    # A file is read by the ranks of one pipeline stage and one expert-parallel rank.
    everything.sort(key=lambda chunk: (chunk.stage, chunk.expert_rank))
    files: list[list[TensorChunk]] = []
    size, last = 0, None
    for chunk in everything:
        nbytes, group = chunk.numel * dtypes[chunk.name].itemsize, (chunk.stage, chunk.expert_rank)
        if group != last or size + nbytes > task.file_bytes:
            files.append([])
            size, last = 0, group
        files[-1].append(chunk)
        size += nbytes
    return _Plan(model, source, {f"__{n}_0.distcp": held for n, held in enumerate(files)}, dtypes)


def _dtypes(held: Sequence[TensorChunk], source: HFFolder, model: SourceModel, dtype: str) -> dict[str, torch.dtype]:
    """The dtype of every global tensor.

    Raises:
        ValueError: tensors that become one global tensor differ, or one is neither of config.json's dtype nor fp32.
    """
    if dtype in CASTS:
        return {chunk.name: CASTS[dtype] for chunk in held}
    found: dict[str, tuple[str, str]] = {}  # global name -> dtype, the tensor that has it
    for chunk in held:
        for tensor in chunk.rule.hf:
            kind = source.dtype(tensor.name)
            first, other = found.setdefault(chunk.name, (kind, tensor.name))
            if first != kind:
                raise ValueError(
                    f"{tensor.name} in {source.file_of(tensor.name)} has dtype {kind}, but {other}, part of the same "
                    f"Megatron parameter, has {first}; if that is meant, choose one with --dtype"
                )
    said = str(model.hf_config.get("dtype") or model.hf_config.get("torch_dtype") or "")
    config_dtype = DTYPE_NAMES.get(getattr(torch, said, None)) if said else None  # type: ignore[arg-type]
    if len({kind for kind, _ in found.values()}) > 1 and config_dtype is not None:
        for kind, name in found.values():
            if kind not in (config_dtype, "F32"):
                raise ValueError(
                    f"{name} in {source.file_of(name)} has dtype {kind}, but config.json says {said}; "
                    "if that is meant, choose a dtype for all with --dtype"
                )
    return {name: DTYPES[kind] for name, (kind, _) in found.items()}


def assemble(chunk: TensorChunk, source: WeightSource, matrix: Callable[[str], Tensor]) -> Tensor:
    """The values of a chunk, in the source's dtype.
    `matrix`: reads a whole tensor, and keeps the last: one after the other, chunks are columns of the same.
    """
    rule = chunk.rule
    parts = list(_parts(chunk, source, matrix))
    if len(parts) == 1 and tuple(parts[0].shape) == chunk.matrix:
        return parts[0]
    out = torch.zeros(chunk.matrix, dtype=DTYPES[source.dtype(rule.hf[0].name)])
    at = 0
    for part in parts:
        out.narrow(rule.dim, at, part.shape[rule.dim]).copy_(part)
        at += part.shape[rule.dim]
    return out


def _parts(chunk: TensorChunk, source: WeightSource, matrix: Callable[[str], Tensor]) -> Iterator[Tensor]:
    rule = chunk.rule
    for piece in chunk.slices:
        name = rule.hf[piece.tensor].name
        if rule.dim == 1:
            yield matrix(name)[:, piece.start : piece.stop].contiguous()
        else:
            yield source.read(name, 0, piece.start, piece.stop)


def _write_state(folder: Path, file: str) -> StoredChunk:
    buffer = io.BytesIO()
    torch.save([None], buffer)
    data = buffer.getvalue()
    (folder / file).write_bytes(data)
    return StoredChunk(_STATES, (), file, 0, len(data), manifest.digest(data))


def _index(plan: _Plan, pieces: Sequence[StoredChunk], state: StoredChunk) -> Metadata:
    """Megatron-Core's index: every global tensor under each of its names, and the extra states."""
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, torch_dist.StorageInfo] = {}
    by_place = {(p.name, p.start): torch_dist.StorageInfo(p.file, p.offset, p.length) for p in (*pieces, state)}
    for chunk in (chunk for held in plan.files.values() for chunk in held):
        for name in (chunk.name, *aliases(chunk.rule)):
            properties = TensorProperties(dtype=plan.dtypes[chunk.name])
            entry = tensors.setdefault(name, TensorStorageMetadata(properties, torch.Size(chunk.shape), []))
            entry.chunks.append(ChunkStorageMetadata(torch.Size(chunk.start), torch.Size(chunk.size)))
            places[MetadataIndex(name, torch.Size(chunk.start))] = by_place[chunk.name, chunk.start]
    states = {name: BytesStorageMetadata() for name in state_names(plan.model.family, plan.model.description)}
    places |= {MetadataIndex(name): by_place[state.name, state.start] for name in states}
    return Metadata({**tensors, **states}, storage_data=places)
