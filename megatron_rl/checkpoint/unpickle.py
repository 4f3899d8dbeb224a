"""Reads what a checkpoint holds as pickles, and makes objects of known classes only: a checkpoint cannot run code.

Torch and Megatron-Core unpickle freely in two places: the index `.metadata`, and pieces that are objects and not tensors
(Transformer Engine does it a third time, with the extra states of its layers). A pickle names the functions that it wants
called, so the author of the file would choose them. Here every name is compared with a list before it is looked up.
"""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from megatron_rl.seams import torch_dist
from megatron_rl.seams.megatron import State

METADATA = ".metadata"

# What `pickle` raises on bytes that are no pickle, or a damaged one.
DAMAGE = (
    *(pickle.UnpicklingError, EOFError, AttributeError, ImportError, LookupError, TypeError, ValueError),
    *(OverflowError, MemoryError),
)
_INDEX = "torch.distributed.checkpoint.metadata"
_OLD_INDEX = "torch.distributed._shard.sharded_tensor.metadata"  # where torch 2.1 and older had two of them
_KNOWN = {
    *((_INDEX, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_INDEX, name) for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    (_INDEX, "_MEM_FORMAT_ENCODING"),
    # Megatron-Core's writers keep the ranks' plans there: plain records and an enumeration.
    *(("torch.distributed.checkpoint.planner", name) for name in ("SavePlan", "WriteItem", "WriteItemType")),
    ("torch.distributed.checkpoint.planner", "TensorWriteData"),
    *((_OLD_INDEX, name) for name in ("TensorProperties", "MEM_FORMAT_ENCODING")),
    *(("torch.distributed.checkpoint.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("pathlib", "PosixPath"),  # the folder it was written to
}
_KNOWN_STATES = {  # of an FP8 layer, as Transformer Engine writes it
    ("torch._utils", "_rebuild_tensor_v2"),
    ("collections", "OrderedDict"),
    ("collections", "deque"),
}
_RECIPES = "transformer_engine.common.recipe"


class UnpickleError(ValueError):
    """A file that is damaged, or that names a class or function which has no place in a checkpoint; the message says which
    file and which class. Nothing that it names was called."""


class _Listed(pickle.Unpickler):
    def __init__(self, file: BinaryIO, source: str) -> None:
        super().__init__(file)
        self._source = source


class _Index(_Listed):
    """Makes the objects of torch's index, and no others."""

    def find_class(self, module: str, name: str) -> object:
        module = "pathlib" if module == "pathlib._local" else module  # as Python 3.13 calls it
        if (module, name) in _KNOWN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype | torch.memory_format):
            return value
        raise _unknown(self._source, f"{module}.{name}")


class _ExtraState(_Listed):
    """Reads the state of a layer, to see what it names."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _KNOWN_STATES:
            return super().find_class(module, name)
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: _load(io.BytesIO(data), self._source)
        if module == _RECIPES and "." not in name and isinstance(found := super().find_class(module, name), type):
            return found
        raise _unknown(self._source, f"{module}.{name}")


def read_metadata(folder: Path) -> Metadata:
    """The index of a distributed checkpoint.

    Raises:
        UnpickleError: it names something else than torch's classes for it, is damaged, or points at files outside the folder.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _Index(file, str(path)).load()
    except UnpickleError:
        raise
    except DAMAGE as error:
        raise UnpickleError(f"{path} cannot be read: {error!r}") from error
    entries, places = getattr(metadata, "state_dict_metadata", None), getattr(metadata, "storage_data", None)
    if not (isinstance(metadata, Metadata) and isinstance(entries, dict) and isinstance(places, dict)):
        raise UnpickleError(f"{path} cannot be read: it is not the index of a distributed checkpoint")
    for info in places.values():
        name = getattr(info, "relative_path", None)
        if not isinstance(name, str) or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise UnpickleError(f"{path} points at a file outside the checkpoint: {name!r}")
    return metadata


def load(state: State, folder: Path) -> State:
    """`dist_checkpointing.load` of a sharded state, with objects of known classes only.

    Raises:
        UnpickleError: on every rank; tensors that were read before are what the checkpoint has.
    """
    from megatron.core import dist_checkpointing

    read_metadata(folder)  # here, since torch wraps what goes wrong in it
    load_common(folder)  # Megatron-Core reads it too, and torch names neither file nor class in a sentence
    with torch_dist.loading_with(read_metadata, _load):
        try:
            loaded: State = dist_checkpointing.load(state, str(folder))
        except CheckpointException as error:
            for failure, _ in error.failures.values():
                if isinstance(failure, UnpickleError):
                    raise failure from None
            raise
    for name, values in loaded.items():
        if isinstance(values, dict):
            _check_extra_states(values, f"{folder}: {name}")
    return loaded


def load_common(folder: Path) -> State:
    """`common.pt`: everything but tensors, the same on every rank.

    Raises:
        UnpickleError: it names a class that has no place there, or is damaged.
    """
    path = folder / "common.pt"
    with path.open("rb") as file:
        common: State = _load(file, str(path))
    return common


def _load(file: BinaryIO, source: str) -> Any:
    """`torch.load` of what has tensors and plain data only, and the few classes that Megatron-Core has named to torch."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"\bGLOBAL ([\w.]+)", str(error))
        if named is None:
            raise UnpickleError(f"{source} is damaged: {str(error).splitlines()[0]}") from error
        raise _unknown(source, named[1]) from None


def _check_extra_states(state: State, source: str) -> None:
    """Transformer Engine unpickles the extra states of its layers without a list; this is a look at them before.

    Raises:
        UnpickleError: one names something else than tensors, plain data and Transformer Engine's recipes.
    """
    for name, value in state.items():
        if isinstance(value, dict):
            _check_extra_states(value, source)
        if not str(name).endswith("_extra_state"):
            continue
        data = bytes(value.cpu().numpy().tobytes()) if isinstance(value, torch.Tensor) else b""
        if isinstance(value, io.BytesIO):
            _load(io.BytesIO(value.getvalue()), f"{source}.{name}")
        elif data:
            _ExtraState(io.BytesIO(data), f"{source}.{name}").load()


def _unknown(source: str, name: str) -> UnpickleError:
    return UnpickleError(
        f"{source} names {name}, which is not one of the classes that a checkpoint is made of: reading the file freely could "
        "run any code. Nothing was run; do not use checkpoints from where this one came from"
    )
