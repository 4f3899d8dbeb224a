"""Checkpoints that run a command when they are unpickled freely; their manifests fit, as a stranger could write them."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_rl.checkpoint import manifest

OBJECT = "decoder.layers.mlp.linear_fc1._extra_state/shard_0_6"  # of a training checkpoint of tests.actor.layouts


class Command:
    """Makes the file `marker` when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self._marker}",)


def in_metadata(folder: Path, marker: Path) -> str:
    """Poisons `.metadata`; returns the file's name."""
    (folder / ".metadata").write_bytes(pickle.dumps(Command(marker)))
    return _listed(folder, ".metadata")


def beside_metadata(folder: Path, marker: Path) -> str:
    """Hides the command in the planner's part of an index that is whole otherwise."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = {"flat": Command(marker)}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return _listed(folder, ".metadata")


def in_common(folder: Path, marker: Path) -> str:
    torch.save({"optimizer": Command(marker)}, folder / "common.pt")
    return _listed(folder, "common.pt")


def in_an_object(folder: Path, marker: Path) -> str:
    """Poisons a piece that is an object and no tensor, here the extra state of a layer."""
    buffer = io.BytesIO()
    torch.save([Command(marker)], buffer)
    data, name = buffer.getvalue(), "__9_0.distcp"
    (folder / name).write_bytes(data)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        if index.fqn == OBJECT:
            metadata.storage_data[index] = replace(info, relative_path=name, offset=0, length=len(data))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    tensors, pieces = manifest.read_tensors(folder)
    own = manifest.StoredChunk(OBJECT, (), name, 0, len(data), manifest.digest(data))
    (folder / manifest.TENSORS).unlink()
    _write(folder, tensors, [own if piece.name == OBJECT else piece for piece in pieces])
    return name


HIDING_PLACES: dict[str, Callable[[Path, Path], str]] = {
    "metadata": in_metadata,
    "planner": beside_metadata,
    "common": in_common,
    "object": in_an_object,
}


def _listed(folder: Path, name: str) -> str:
    if (folder / manifest.TENSORS).exists():
        _write(folder, *manifest.read_tensors(folder))
    return name


def _write(folder: Path, tensors: dict[str, manifest.TensorInfo], pieces: list[manifest.StoredChunk]) -> None:
    about: dict[str, Any] = manifest.read(folder)
    for key in ("files", "format", "digest"):
        about.pop(key, None)
    manifest.write(folder, about, tensors, pieces)
