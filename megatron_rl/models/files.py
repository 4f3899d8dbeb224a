"""Hugging Face folders on disk: lazy reads from sharded safetensors, and folders that appear whole or not at all."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.runtime.disk import sync, sync_tree

INDEX = "model.safetensors.index.json"
# The format's names of dtypes.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BLOCK = 2**26  # bytes read at once where only some columns are wanted
_LARGEST_READ = 2**30  # Linux reads at most 2 GiB - 4 KiB in one call


class WeightSource(Protocol):
    """A whole model's tensors under their Hugging Face names, wherever they lie: what weights are loaded from."""

    folder: Path

    def names(self) -> set[str]: ...

    def file_of(self, name: str) -> Path: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str: ...

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor: ...


@dataclass(frozen=True)
class Entry:
    """A tensor in a safetensors file: its dtype as the format names it, and where in the file its bytes lie."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFolder:
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
        rows, *rest = entry.shape
        row_bytes = entry.nbytes // rows if rows else 0
        dtype = DTYPES[entry.dtype]
        with self._files[name].open("rb", buffering=0) as file:
            if dim == 0:
                stop = min(stop, rows)
                out = torch.empty((stop - start, *rest), dtype=dtype)
                self._read_into(out, name, file, entry.offset + start * row_bytes)
                return out
            out = torch.empty((rows, stop - start, *rest[1:]), dtype=dtype)
            block = max(1, _BLOCK // max(row_bytes, 1))
            for first in range(0, rows, block):
                part = torch.empty((min(block, rows - first), *rest), dtype=dtype)
                self._read_into(part, name, file, entry.offset + first * row_bytes)
                out[first : first + block].copy_(part[:, start:stop])
            return out

    def entry(self, name: str) -> Entry:
        path = self._files[name]
        if path not in self._entries:
            self._entries[path] = read_header(path)
        if name not in self._entries[path]:
            raise ValueError(f"{path} does not hold {name}, although the folder's index lists it there")
        return self._entries[path][name]

    def _read_into(self, target: Tensor, name: str, file: BinaryIO, offset: int) -> None:
        if target.numel() == 0:
            return
        view = target.view(-1).view(torch.uint8).numpy().data
        while view:
            count = os.preadv(file.fileno(), [view[:_LARGEST_READ]], offset)
            if count == 0:
                raise ValueError(f"{self._files[name]} ends in the middle of {name}: the file was cut short")
            view, offset = view[count:], offset + count

    def _indexed(self) -> dict[str, Path]:
        index = self.folder / INDEX
        try:
            files = {name: self.folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (json.JSONDecodeError, KeyError, AttributeError) as error:
            raise ValueError(f"{index} is not a safetensors index: {error!r}") from error
        single = self.folder / "model.safetensors"  # transformers would take this, vLLM what the index says
        if single.is_file() and single not in files.values():
            raise ValueError(
                f"{self.folder} holds two models: {single.name}, and the files that {index.name} names; remove one of them"
            )
        for path in sorted(set(files.values())):
            if not path.is_file():
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
            header = json.loads(file.read(length))
        entries = {}
        for name, about in header.items():
            if name != "__metadata__":
                begin, end = about["data_offsets"]
                entry = Entry(about["dtype"], tuple(about["shape"]), 8 + length + begin, end - begin)
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
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"cannot read {path}: its header is damaged ({error!r})") from error
    return entries


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file with the permissions of its folder (the library's own are the owner's alone).

    Raises:
        OSError: the file cannot be written, for example because the disk is full.
    """
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from error
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


@contextmanager
def whole_folder(folder: str | Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` (replacing it) when the block ends well, and is removed otherwise. What it
    becomes is on the disk.

    What a process that was killed in here left is removed first. The folder it is to be in has to be there: a run folder that
    was removed does not come back with nothing but a model in it.
    """
    target = Path(folder)
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
