"""Hugging Face folders on disk: lazy reads from sharded safetensors, and folders that appear whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"


class SafetensorsFolder:
    """The tensors of a folder's `*.safetensors`, read slice by slice; a file is opened when first needed.

    Raises:
        ValueError: the folder has no safetensors, its index names a missing file or tensor, or a file is damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._open: dict[Path, Any] = {}
        self._files = self._indexed() if (self.folder / INDEX).is_file() else self._scanned()

    def names(self) -> set[str]:
        return set(self._files)

    def file_of(self, name: str) -> Path:
        return self._files[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The dtype's name in the file format: F32, BF16, F8_E4M3, ..."""
        return str(self._slice(name).get_dtype())

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Entries [start, stop) along `dim` (0 or 1) of a tensor, in the file's dtype."""
        part = self._slice(name)
        return part[start:stop] if dim == 0 else part[:, start:stop]

    def _slice(self, name: str) -> Any:
        path = self._files[name]
        try:
            return self._handle(path).get_slice(name)
        except SafetensorError as error:
            raise ValueError(f"{path} does not hold {name}, although its folder's index says so: {error}") from error

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"cannot read {path}: {error}") from error
        return self._open[path]

    def _indexed(self) -> dict[str, Path]:
        index = self.folder / INDEX
        try:
            files = {name: self.folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (json.JSONDecodeError, KeyError, AttributeError) as error:
            raise ValueError(f"{index} is not a safetensors index: {error!r}") from error
        for path in sorted(set(files.values())):
            if not path.is_file():
                raise ValueError(f"{path} is missing, but {index.name} names it")
        return files

    def _scanned(self) -> dict[str, Path]:
        paths = sorted(self.folder.glob("*.safetensors"))
        if not paths:
            raise ValueError(f"model folder {self.folder} has no *.safetensors files")
        files: dict[str, Path] = {}
        for path in paths:
            for name in self._handle(path).keys():  # noqa: SIM118 (not a mapping)
                if name in files:
                    raise ValueError(f"{name} is in both {files[name].name} and {path.name} of {self.folder}")
                files[name] = path
        return files


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


@contextmanager
def whole_folder(folder: str | Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` (replacing it) when the block ends well, and is removed otherwise."""
    target = Path(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    previous = target.with_name(f".{target.name}.{os.getpid()}.old")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if target.exists():
        target.rename(previous)
    temporary.rename(target)
    shutil.rmtree(previous, ignore_errors=True)
