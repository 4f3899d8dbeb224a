"""Megatron-Core distributed checkpoint -> Hugging Face folder, one tensor at a time."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import megatron_rl
from megatron_rl.base import block_fp8
from megatron_rl.checkpoint import manifest
from megatron_rl.checkpoint.convert.global_tensors import Memory
from megatron_rl.checkpoint.convert.jobs import Conversion, Identity, Progress, made_by
from megatron_rl.checkpoint.convert.merged import MergedModel, has_adapters, stored_model
from megatron_rl.checkpoint.convert.reader import MegatronModel
from megatron_rl.checkpoint.convert.source import SourceModel, fingerprint
from megatron_rl.checkpoint.convert.to_megatron import CASTS
from megatron_rl.checkpoint.convert.write_behind import WriteBehind
from megatron_rl.checkpoint.manifest import StoredChunk
from megatron_rl.models import fp8_weights as fp8
from megatron_rl.models.hf_config import unquantised, with_dtype
from megatron_rl.weights.files import (
    DTYPES,
    Bits,
    SafetensorsFolder,
    WeightSource,
    as_bits,
    as_tensor,
    cast_bits,
    copy_companions,
    shard_names,
    write_index,
    write_json,
)
from megatron_rl.weights.stacked import Stacked

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ToHF(Conversion):
    """A conversion to a Hugging Face folder."""

    megatron: Path  # the source: the folder with `.metadata`
    config: Path  # the Hugging Face folder with its config.json, tokenizer and the rest; of adapters, their base
    dtype: str = "keep"  # `keep`, `bf16`, `fp32`, or `fp8` (block-wise, with scales)
    file_bytes: int = 5 * 10**9  # how large a file may grow, unless one tensor is larger
    any_padding: bool = False  # see `MegatronModel`
    master: bool = False  # see `MegatronModel`

    @functools.cached_property
    def _plan(self) -> _Plan:
        return _planned(self)

    def identity(self) -> Identity:
        return {
            "to": "hf",
            "dtype": self.dtype,
            "master": self.master,
            "file_bytes": self.file_bytes,
            "version": megatron_rl.__version__,
            "source": fingerprint(self.megatron, ("*.distcp", ".metadata")) + fingerprint(self.config, self._of_base()),
        }

    def _of_base(self) -> tuple[str, ...]:
        return ("*.safetensors", "*.distcp") if has_adapters(self.megatron) else ()

    def files(self) -> list[tuple[str, int]]:
        return [(name, sum(t.nbytes for t in held)) for name, held in self._plan.files.items()]

    def write(self, file: str, folder: Path, progress: Progress) -> list[StoredChunk]:
        tensors = self._plan.files[file]
        header, offsets = _header(tensors)
        chunks: dict[str, StoredChunk] = {}
        memory = Memory()
        with WriteBehind(folder / file) as out:
            out.write([header])
            for tensor in tensors:
                at = offsets[tensor.name]
                digest = out.write((part.data for part in self._parts(tensor, memory)), at=at)
                chunks[tensor.name] = StoredChunk(
                    tensor.name, (0,) * len(tensor.shape), file, at, tensor.nbytes, digest
                )
                progress(tensor.nbytes)
        return [chunks[tensor.name] for tensor in tensors]

    def finish(self, folder: Path, chunks: Sequence[StoredChunk]) -> None:
        plan = self._plan
        tensors = [tensor for held in plan.files.values() for tensor in held]
        names = {file: [tensor.name for tensor in held] for file, held in plan.files.items()}
        write_index(folder, names, sum(tensor.nbytes for tensor in tensors))
        config = unquantised(plan.model.hf_config)
        dtypes = {tensor.dtype for tensor in tensors} - {block_fp8.DTYPE}
        if self.dtype == "fp8":
            config = with_dtype(config, "bfloat16")
            config["quantization_config"] = fp8.quantization_config(plan.model.family, plan.model.description)
        elif len(dtypes) == 1:
            config = with_dtype(config, DTYPES[dtypes.pop()].name)
        write_json(folder / "config.json", config)
        copy_companions(self.config, folder)
        listed = {t.name: manifest.TensorInfo(t.shape, DTYPES[t.dtype].name) for t in tensors}
        manifest.write(folder, made_by(self, plan.model.family.name), listed, chunks)

    def names(self) -> list[str]:
        return [tensor.name for held in self._plan.files.values() for tensor in held]

    def expected(self, name: str, start: int, stop: int) -> Tensor:
        plan = self._plan
        tensor = plan.tensors[name]
        if plan.scaled(tensor.source):
            [values] = self._parts(tensor, Memory())
            return as_tensor(values[start:stop], tensor.dtype)
        values = np.empty((stop - start, *tensor.shape[1:]), DTYPES[plan.source.dtype(name)].bits)
        plan.source.read_into(values, name, 0, start)
        return as_tensor(cast_bits(values, plan.source.dtype(name), tensor.dtype), tensor.dtype)

    def result(self, target: Path) -> WeightSource:
        return SafetensorsFolder(target)

    def _parts(self, tensor: _Tensor, memory: Memory) -> Iterator[Bits]:
        """The values of a tensor of the result, some at a time; they hold until the next are asked for."""
        source, name = self._plan.source, tensor.source
        if not self._plan.scaled(name):
            for part in source.parts(name, memory):
                yield cast_bits(part, source.dtype(name), tensor.dtype)
            return
        values = memory.array(source.shape(name), DTYPES[source.dtype(name)].bits)
        source.read_into(values, name)
        quantised, scales = block_fp8.quantise(as_tensor(values, source.dtype(name)))
        if not scales.isfinite().all():
            raise ValueError(
                f"{name} in {source.file_of(name)} cannot be stored in FP8: it has values that are not finite"
            )
        yield as_bits(quantised if tensor.name == name else scales)


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the result, made from the model's tensor `source`."""

    name: str
    source: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors names it

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class _Plan:
    model: SourceModel
    source: MegatronModel | MergedModel | Stacked
    files: dict[str, list[_Tensor]]
    tensors: dict[str, _Tensor]

    def scaled(self, name: str) -> bool:
        return name + block_fp8.SCALE in self.tensors


def _planned(task: ToHF) -> _Plan:
    model = SourceModel.read(task.config)
    source: MegatronModel | MergedModel | Stacked
    source = stored_model(task.megatron, model, task.any_padding, task.master)
    quantised = {tensor.name for rule in model.weights() if rule.is_projection for tensor in rule.hf}
    names = [tensor.name for rule in model.weights() for tensor in rule.hf]
    if model.family.stacking is not None:
        if task.dtype == "fp8":
            raise ValueError(
                f"--dtype fp8: family `{model.family.name}` stacks its experts, and no engine reads them in FP8"
            )
        source = Stacked(source, model, model.family.stacking)
        names = list(source.tensors)
    files: list[list[_Tensor]] = []
    size = 0
    for name in names:
        tensors = _made_of(name, source, task.dtype, name in quantised)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if not files or size + nbytes > task.file_bytes:
            files.append([])
            size = 0
        files[-1] += tensors
        size += nbytes
    named = dict(zip(shard_names(len(files)), files, strict=True))
    return _Plan(model, source, named, {tensor.name: tensor for tensors in files for tensor in tensors})


def _made_of(name: str, source: WeightSource, dtype: str, is_projection: bool) -> list[_Tensor]:
    """The tensors of the result that one of the model becomes; they stay in one file."""
    shape = source.shape(name)
    if dtype == "fp8" and is_projection:
        return [
            _Tensor(name, name, shape, block_fp8.DTYPE),
            _Tensor(name + block_fp8.SCALE, name, block_fp8.scales_shape(shape), "F32"),
        ]
    cast = CASTS.get("bf16" if dtype == "fp8" else dtype)
    return [_Tensor(name, name, shape, cast or source.dtype(name))]


def _header(held: Sequence[_Tensor]) -> tuple[bytes, dict[str, int]]:
    """A safetensors file's header, and where in the file each tensor goes (wider dtypes first, which keeps all aligned)."""
    entries: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
    at, begins = 0, {}
    for tensor in sorted(held, key=lambda tensor: -DTYPES[tensor.dtype].itemsize):
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        begins[tensor.name] = at
        at += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + begin for name, begin in begins.items()}
