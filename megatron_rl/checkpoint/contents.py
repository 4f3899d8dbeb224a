"""Contents of a checkpoint, and differences of two: Hugging Face folders, training checkpoints, Megatron checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypedDict

from megatron_rl.base.messages import errors_named
from megatron_rl.checkpoint import manifest
from megatron_rl.checkpoint.convert.global_tensors import TorchDist
from megatron_rl.checkpoint.convert.merged import stored_model
from megatron_rl.checkpoint.convert.source import HFFolder, SourceModel, config_folder, is_megatron, megatron_folder
from megatron_rl.models import read_hf_config
from megatron_rl.weights.files import DTYPE_NAMES, DTYPES, WeightSource

_BLOCK = 2**26  # bytes of a tensor compared at once


# ----------------------------------------------------------------------------------------------------------- contents
@dataclass(frozen=True)
class TensorLine:
    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    part: str  # model | optimizer
    pieces: int  # into which the files cut it


class Total(TypedDict):
    tensors: int
    values: int
    bytes: int
    dtypes: dict[str, int]  # bytes of each


@dataclass(frozen=True)
class Contents:
    """Attributes:
    kind: `Hugging Face`, `training checkpoint`, `converted checkpoint` or `plain Megatron checkpoint`.
    about: the checkpoint's own metadata, where present: step, layout, versions, recipe, model.
    files: name and size.
    """

    folder: str
    kind: str
    about: dict[str, object]
    files: dict[str, int]
    tensors: list[TensorLine] = field(repr=False)
    damage: list[str] | None = None

    def totals(self) -> dict[str, Total]:
        """Values, bytes and dtypes of the model and of the optimizer's state."""
        by_part: dict[str, Total] = {}
        for tensor in self.tensors:
            total = by_part.setdefault(tensor.part, Total(tensors=0, values=0, bytes=0, dtypes={}))
            total["tensors"] += 1
            total["values"] += math.prod(tensor.shape)
            total["bytes"] += tensor.nbytes
            total["dtypes"][tensor.dtype] = total["dtypes"].get(tensor.dtype, 0) + tensor.nbytes
        return by_part

    def as_json(self, tensors: bool) -> dict[str, object]:
        content = asdict(self) | {"totals": self.totals()}
        if not tensors:
            del content["tensors"]
        return content


def contents(folder: Path, check: bool = False) -> Contents:
    """Reads what a folder holds; no tensor's values unless `check`, which compares every checksum.

    Raises:
        ValueError: the folder is no checkpoint, or a file is missing or cut short.
    """
    if not is_megatron(folder) and (folder / "config.json").is_file():
        kind, about, tensors = "Hugging Face", _about_hf(folder), list(_hf_tensors(folder))
    else:
        folder = megatron_folder(folder)
        kind, about = _about_megatron(folder)
        tensors = list(_megatron_tensors(TorchDist(folder)))
    files = {p.relative_to(folder).as_posix(): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    damage = None
    if check:
        if manifest.MANIFEST not in files:
            raise ValueError(f"{folder} has no {manifest.MANIFEST}: there are no checksums to compare")
        damage = manifest.verify(folder)
    return Contents(str(folder), kind, about, files, tensors, damage)


def _about_hf(folder: Path) -> dict[str, object]:
    config = read_hf_config(folder)
    keys = ("architectures", "dtype", "torch_dtype", "num_hidden_layers", "hidden_size", "vocab_size", "num_experts")
    about: dict[str, object] = {
        key: config[key] for key in (*keys, "tie_word_embeddings") if config.get(key) is not None
    }
    if isinstance(quantization := config.get("quantization_config"), dict):
        about["quantization"] = quantization.get("quant_method")
    if (folder / manifest.MANIFEST).is_file():
        about["made by"] = f"megatron-rl {manifest.read(folder).get('version')}"
    return about


def _about_megatron(folder: Path) -> tuple[str, dict[str, object]]:
    if not (folder / manifest.MANIFEST).is_file():
        backend = folder / "metadata.json"
        with errors_named(f"{backend} cannot be read", OSError, ValueError, RecursionError):
            return "plain Megatron checkpoint", {
                "backend": json.loads(backend.read_text())
            } if backend.is_file() else {}
    content = manifest.read(folder)
    about = {key: value for key, value in content.items() if key not in ("files", "format", "kind", "digest", "task")}
    if content.get("kind") == "conversion":
        return "converted checkpoint", about
    for key, name in (("recipe", "recipe.yaml"), ("state", "state.json")):
        if (folder / name).is_file():
            about[key] = str(folder / name)
    return "training checkpoint", about


def _hf_tensors(folder: Path) -> Iterator[TensorLine]:
    files = HFFolder(folder)
    for name in sorted(files.names(), key=_natural):
        entry = files.entry(name)
        yield TensorLine(name, entry.shape, DTYPES[entry.dtype].name, entry.nbytes, "model", 1)


def _megatron_tensors(checkpoint: TorchDist) -> Iterator[TensorLine]:
    for name in sorted(checkpoint.tensors, key=_natural):
        tensor = checkpoint.tensors[name]
        part = "optimizer" if name.startswith(("optimizer.", "chained_")) else "model"
        nbytes = math.prod(tensor.shape) * DTYPES[DTYPE_NAMES[tensor.dtype]].itemsize
        yield TensorLine(name, tensor.shape, tensor.dtype, nbytes, part, len(tensor.chunks))


def _natural(name: str) -> tuple[tuple[bool, int, str], ...]:
    return tuple((part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split("."))


# ----------------------------------------------------------------------------------------------------------- difference
@dataclass(frozen=True)
class Difference:
    """One tensor in both checkpoints.

    Attributes:
        changed: how many values differ.
        max_abs: largest |difference|.
        relative: norm of the difference / norm of the first (L2).
        problem: why the values cannot be compared (another shape), or None.
    """

    name: str
    values: int
    changed: int
    max_abs: float
    relative: float
    problem: str | None = None


@dataclass(frozen=True)
class Comparison:
    only_first: list[str]
    only_second: list[str]
    tensors: list[Difference]

    @property
    def identical(self) -> bool:
        return not (self.only_first or self.only_second or any(d.changed or d.problem for d in self.tensors))


def difference(first: Path, second: Path, config: Path | None = None) -> Comparison:
    """Compares the weights of two checkpoints of any kind, under their Hugging Face names.

    Args:
        config: the Hugging Face folder with the config.json of plain Megatron checkpoints.
    """
    a, b = _opened(first, config), _opened(second, config)
    common = sorted(a.names() & b.names(), key=_natural)
    return Comparison(
        sorted(a.names() - b.names(), key=_natural),
        sorted(b.names() - a.names(), key=_natural),
        [_difference(name, a, b) for name in common],
    )


def _opened(folder: Path, config: Path | None) -> WeightSource:
    if not is_megatron(folder) and (folder / "config.json").is_file():
        return HFFolder(folder)
    folder = megatron_folder(folder)
    model = SourceModel.read(config_folder(folder, config))
    return stored_model(folder, model, any_padding=True)


def _difference(name: str, a: WeightSource, b: WeightSource) -> Difference:
    shape = a.shape(name)
    size = math.prod(shape)
    if shape != b.shape(name):
        return Difference(name, size, size, math.inf, math.inf, f"shape {shape} and {b.shape(name)}")
    length = shape[0] if shape else 1
    rows = max(1, _BLOCK // max(1, size // max(length, 1) * 8))
    changed, largest, square, norm = 0, 0.0, 0.0, 0.0
    for start in range(0, length, rows):
        x, y = (source.read(name, 0, start, min(length, start + rows)).double() for source in (a, b))
        delta = (x - y).abs()
        differs = (x != y) & ~(x.isnan() & y.isnan())  # a NaN on one side only differs
        changed += int(differs.sum())
        if differs.any():
            delta = delta[differs].nan_to_num(math.inf)
            largest = max(largest, float(delta.max()))
            square += float(delta.square().sum())
        norm += float(x.nan_to_num(0.0, 0.0, 0.0).square().sum())
    relative = 0.0 if square == 0 else math.inf if norm == 0 else math.sqrt(square / norm)
    return Difference(name, size, changed, largest, relative)
