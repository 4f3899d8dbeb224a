"""Hugging Face folders on disk: lazy reads from sharded safetensors, and folders that appear whole or not at all.

Importing it loads no torch: what only moves values handles them as numpy arrays of unsigned integers with the same bits.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError

from megatron_rl.base.messages import errors_named
from megatron_rl.runtime.disk import sync, sync_tree

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_rl.models.family import Model

INDEX = "model.safetensors.index.json"
# Everything beside the weights and config.json that belongs to a model: tokenizer, generation config, chat template.
_COMPANIONS = (
    "generation_config.json",
    "*processor_config.json",  # of images
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "tekken.json",
    "chat_template*",
    "additional_chat_templates",
    "LICENSE*",
)
Bits = np.ndarray[tuple[int, ...], np.dtype[np.unsignedinteger]]


@dataclass(frozen=True)
class DType:
    name: str  # torch's, without `torch.`
    itemsize: int  # bytes

    @property
    def bits(self) -> np.dtype[np.unsignedinteger]:
        """Unsigned integers of the same size."""
        return np.dtype(f"u{self.itemsize}")


# The format's names of dtypes.
DTYPES = {
    "F64": DType("float64", 8),
    "F32": DType("float32", 4),
    "F16": DType("float16", 2),
    "BF16": DType("bfloat16", 2),
    "F8_E4M3": DType("float8_e4m3fn", 1),
    "F8_E5M2": DType("float8_e5m2", 1),
    "F8_E8M0": DType("float8_e8m0fnu", 1),
    "I64": DType("int64", 8),
    "I32": DType("int32", 4),
    "I16": DType("int16", 2),
    "I8": DType("int8", 1),
    "U8": DType("uint8", 1),
    "BOOL": DType("bool", 1),
}
DTYPE_NAMES = {dtype.name: name for name, dtype in DTYPES.items()}
_BLOCK = 2**26  # bytes read at once where only some columns are wanted
_LARGEST_READ = 2**30  # Linux reads at most 2 GiB - 4 KiB in one call


class WeightSource(ABC):
    """A whole model's tensors under their Hugging Face names, wherever they lie: what weights are loaded from.

    Attributes:
        folder: for messages.
        tensors: shape of each, and dtype as safetensors names it; not of a source that overrides what asks for them.
    """

    folder: Path
    tensors: Mapping[str, tuple[tuple[int, ...], str]]

    def names(self) -> set[str]:
        return set(self.tensors)

    def file_of(self, name: str) -> Path:
        return self.folder

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name][0]

    def dtype(self, name: str) -> str:
        return self.tensors[name][1]

    @abstractmethod
    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Entries [start, stop) along `dim` (0 or 1) of a tensor."""


class MadeWeights(WeightSource):
    """Tensors that are made as they are read, by a subclass's `read`; names and shapes are those of the model's rules."""

    def __init__(self, model: Model, dtype: str, folder: Path) -> None:
        self.folder = folder
        rules = model.weights()
        self.tensors = {tensor.name: (tensor.sizes(model.dims), dtype) for rule in rules for tensor in rule.hf}


@dataclass(frozen=True)
class Entry:
    """A tensor in a safetensors file: its dtype as the format names it, and where in the file its bytes lie."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def rows(self) -> int:
        """A number without dimensions is read as a row of its own."""
        return self.shape[0] if self.shape else 1


class SafetensorsFolder(WeightSource):
    """The tensors of a folder's `*.safetensors`, read slice by slice; a file is opened when first needed.

    Bytes are read into place rather than mapped: a mapped file counts as this process's memory for as long as it is open,
    and ends the process where it shrinks.

    Raises:
        ValueError: the folder has no safetensors, its index names a missing file or tensor, or a file is damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._entries: dict[Path, dict[str, Entry]] = {}
        self._files = self._indexed() if (self.folder / INDEX).is_file() else self._scanned()
        self._stored: Mapping[str, str] = {}

    def rename(self, stored: Mapping[str, str]) -> None:
        """From here on it has these tensors only, by the names that they shall have; the values are those in files."""
        self._files = {name: self._files[old] for name, old in stored.items()}
        self._stored = stored

    def names(self) -> set[str]:
        return set(self._files)

    def file_of(self, name: str) -> Path:
        return self._files[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entry(name).shape

    def dtype(self, name: str) -> str:
        """The dtype's name in the file format: F32, BF16, F8_E4M3, ..."""
        return self.entry(name).dtype

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Entries [start, stop) along `dim` (0 or 1) of a tensor, in the file's dtype."""
        entry = self.entry(name)
        rows, rest, bits = entry.rows, entry.shape[1:], DTYPES[entry.dtype].bits
        if dim == 0:
            out = np.empty((min(stop, rows) - start, *rest), bits)
            self.read_into(out, name, start)
            return as_tensor(out, entry.dtype)
        out = np.empty((rows, stop - start, *rest[1:]), bits)
        block = max(1, _BLOCK // max(entry.nbytes // max(rows, 1), 1))
        for first in range(0, rows, block):
            part = np.empty((min(block, rows - first), *rest), bits)
            self.read_into(part, name, first)
            out[first : first + block] = part[:, start:stop]
        return as_tensor(out, entry.dtype)

    def read_into(self, out: Bits, name: str, start: int = 0) -> None:
        """Fills `out`, contiguous, with a tensor's rows from `start` on."""
        entry = self.entry(name)
        if out.size == 0:
            return
        view, offset = out.data.cast("B"), entry.offset + start * (entry.nbytes // entry.rows)
        with self._files[name].open("rb", buffering=0) as file:
            while view:
                count = os.preadv(file.fileno(), [view[:_LARGEST_READ]], offset)
                if count == 0:
                    raise ValueError(f"{self._files[name]} ends in the middle of {name}: the file was cut short")
                view, offset = view[count:], offset + count

    def entry(self, name: str) -> Entry:
        path, stored = self._files[name], self._stored.get(name, name)
        if path not in self._entries:
            self._entries[path] = read_header(path)
        if stored not in self._entries[path]:
            raise ValueError(f"{path} does not hold {stored}, although the folder's index lists it there")
        return self._entries[path][stored]

    def _indexed(self) -> dict[str, Path]:
        index = self.folder / INDEX
        try:
            files = {name: self.folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
            missing = {path for path in {*files.values()} if not path.is_file()}
        except (ValueError, LookupError, AttributeError, TypeError, RecursionError, OSError) as error:
            raise ValueError(f"{index} is not a safetensors index: {error!r:.300}") from error
        for path in sorted({*files.values()}):
            if path.parent != self.folder:
                raise ValueError(f"{index} names {path!s:.200}, which is not in its folder")
        single = self.folder / "model.safetensors"  # transformers would take this, vLLM what the index says
        if single.is_file() and single not in files.values():
            raise ValueError(
                f"{self.folder} holds two models: {single.name}, and the files that {index.name} names; remove one of them"
            )
        for path in sorted(set(files.values())):
            if path in missing:
                held = sorted(name for name, file in files.items() if file == path)
                more = f" and {len(held) - 1} more" if len(held) > 1 else ""
                raise ValueError(f"{path} is missing, but {index.name} names it: it holds {held[0]}{more}")
        return files

    def _scanned(self) -> dict[str, Path]:
        paths = sorted(self.folder.glob("*.safetensors"))
        if not paths:
            pickled = any(self.folder.glob("pytorch_model*.bin"))
            remedy = "; transformers' from_pretrained and save_pretrained make them of its *.bin" if pickled else ""
            raise ValueError(f"model folder {self.folder} has no *.safetensors files{remedy}")
        files: dict[str, Path] = {}
        for path in paths:
            self._entries[path] = read_header(path)
            for name in self._entries[path]:
                if name in files:
                    raise ValueError(f"{name} is in both {files[name].name} and {path.name} of {self.folder}")
                files[name] = path
        return files


def read_header(path: Path) -> dict[str, Entry]:
    """The header of a safetensors file: its tensors by name.

    Raises:
        ValueError: it cannot be read, or is not whole: the message names the first tensor that does not fit.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError(f"cannot read {path}: it has {size} bytes, too few for its header")
            header = _parsed(file.read(length))
        entries = {}
        for name, about in header.items():
            if name != "__metadata__":
                begin, end = _whole(about["data_offsets"], 2)
                entry = Entry(about["dtype"], _whole(about["shape"]), 8 + length + begin, end - begin)
                if entry.dtype not in DTYPES:
                    raise ValueError(f"cannot read {path}: {name} has dtype {entry.dtype}, which is not known")
                expected = math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
                if entry.nbytes != expected or entry.offset + entry.nbytes > size:
                    raise ValueError(
                        f"cannot read {path}: {name} should have {expected} bytes and end at byte "
                        f"{entry.offset + expected}; the header gives it {entry.nbytes}, the file has {size}"
                    )
                entries[name] = entry
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"cannot read {path}: its header is damaged ({error!r:.300})") from error
    return entries


def _parsed(data: bytes) -> Any:
    with errors_named("", as_error=TypeError):  # no JSON, or a number of thousands of digits
        return json.loads(data)


def _whole(values: object, count: int | None = None) -> tuple[int, ...]:
    """Whole numbers from 0 on, below 2^63, as a header has them; so many, where that is said."""
    if (
        not isinstance(values, list)
        or len(values) != (len(values) if count is None else count)
        or not all(type(value) is int and 0 <= value < 2**63 for value in values)
    ):
        raise TypeError(f"{values!r:.100} in the place of whole numbers")
    return tuple(values)


def as_tensor(bits: Bits, dtype: str) -> Tensor:
    """The values that they are the bits of, in the same memory; `dtype` as the format names it."""
    import torch

    return torch.from_numpy(bits).view(getattr(torch, DTYPES[dtype].name))


def as_bits(values: Tensor) -> Bits:
    """The bits of values, in their memory where that is contiguous."""
    import torch

    return values.contiguous().view(getattr(torch, f"uint{values.itemsize * 8}")).numpy()


def cast_bits(bits: Bits, dtype: str, to: str) -> Bits:
    """The bits of the same values in another dtype; both as the format names them."""
    if dtype == to:
        return bits
    import torch

    return as_bits(as_tensor(bits, dtype).to(getattr(torch, DTYPES[to].name)))


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file with the permissions of its folder (the library's own are the owner's alone).

    Raises:
        OSError: the file cannot be written, for example because the disk is full.
    """
    from safetensors.torch import save_file

    with errors_named(f"cannot write {path}", SafetensorError, as_error=OSError):
        save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(path.parent.stat().st_mode & 0o666)


def shard_names(count: int) -> list[str]:
    """File names of a model in `count` files."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def write_index(folder: Path, files: Mapping[str, Sequence[str]], total: int) -> None:
    """The index of a model in several files: the file of each tensor, and the total bytes."""
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def companions(source: Path) -> dict[str, Path]:
    """Tokenizer, generation config, chat templates and licence of a model folder: every file by its name in the folder.

    A link that leads nowhere is among them, so that copying it fails: a model without its tokenizer is no copy.
    """
    found = [path for pattern in _COMPANIONS for path in source.glob(pattern)]
    files = [file for path in found for file in (path.rglob("*") if path.is_dir() else [path]) if not file.is_dir()]
    return {file.relative_to(source).as_posix(): file for file in files}


def copy_companions(source: Path, folder: Path) -> None:
    """Copies them to another folder."""
    for name, path in companions(source).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)


@contextmanager
def whole_folder(folder: str | Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` (replacing it) when the block ends well, and is removed otherwise. What it
    becomes is on the disk.

    What a process that was killed in here left is removed first. The folder it is to be in has to be there: a run folder that
    was removed does not come back with nothing but a model in it.
    """
    target = Path(folder).resolve()  # what a link leads to is replaced
    _remove_left(target)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    previous = target.with_name(f".{target.name}.{os.getpid()}.old")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        sync_tree(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if target.exists():
        target.rename(previous)
    temporary.rename(target)
    sync(target.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _remove_left(target: Path) -> None:
    """Removes temporary folders of processes that are gone; a whole one that was just out of the way comes back."""
    for path in target.parent.glob(".*"):
        match = re.fullmatch(rf"\.{re.escape(target.name)}\.(\d+)\.(tmp|old)", path.name)
        if match is None or Path(f"/proc/{match[1]}").exists():
            continue
        if match[2] == "old" and not target.exists():
            path.rename(target)
        else:
            shutil.rmtree(path, ignore_errors=True)
