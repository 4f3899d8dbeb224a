"""The index `.metadata` of a distributed checkpoint: which tensors it has, and where their chunks lie.

It is a pickle of torch's classes: unpickled freely, it could run any code. Every name in it is compared with a list, and what
a listed name gives is a stand-in made here, never torch's or Python's own class: pickle sets attributes of whatever it has at
hand, classes included. Torch's objects are made of the stand-ins afterwards, of checked values. Who only reads tensors
(`inspect`, conversion to Hugging Face) does without them, and without importing torch.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

METADATA = ".metadata"
# metadata.json of Megatron-Core beside torch's `.metadata`
BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}

# What `pickle` raises on bytes that are no pickle, or a damaged one.
DAMAGE = (
    *(pickle.UnpicklingError, EOFError, AttributeError, ImportError, LookupError, TypeError, ValueError),
    *(OverflowError, MemoryError, AssertionError, struct.error),
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
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),  # the folder it was written to
}

# Names of dtypes and memory formats.
_DTYPES = re.compile(r"bool|b?float\d+\w*|u?int\d+|complex\d+")
_TORCH_VALUES = re.compile(rf"{_DTYPES.pattern}|(contiguous|preserve)_format|channels_last(_3d)?")


class UnpickleError(ValueError):
    """A file that is damaged, or that names a class or function which has no place in a checkpoint; the message says which
    file and which class. Nothing that it names was called."""


class _Unchanged(type):
    """Classes that a pickle cannot change: its BUILD sets attributes, of classes too."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise AttributeError(f"a pickle cannot set {name!r} of a class")


class FlatKey(tuple[Any, ...], metaclass=_Unchanged):
    """A tuple of a pickle. As a key it may hold no tuple: Python hashes shared ones again and again, so that forty that
    hold the one before twice take hours, and follows deep ones until the stack overflows."""

    __slots__ = ()
    __eq__ = tuple.__eq__

    def __hash__(self) -> int:
        if any(isinstance(value, tuple) for value in self):
            raise pickle.UnpicklingError("a key is a tuple of tuples")
        return super().__hash__()


# Classes that a pickle cannot set attributes of.
_PLAIN: dict[tuple[str, str], type] = {
    ("torch", "Size"): FlatKey,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
}


class _Fixed(_Unchanged):
    """Classes of which a pickle cannot change an instance that a call made either."""

    def __call__(cls, *made_from: object) -> Any:
        record = super().__call__()
        record.made_from, record.is_open = made_from, False
        return record


class Record(metaclass=_Fixed):
    """Stands for an object of a class that a pickle names: its attributes, or else what it is made from."""

    made_from: tuple[object, ...] = ()
    is_open = True  # made without its constructor: its state may follow

    def __new__(cls, *made_from: object) -> Record:
        """A pickle gives a named tuple's fields here, as of Transformer Engine's `Format`."""
        record = super().__new__(cls)
        if made_from:
            record.made_from = made_from
        return record

    def __setstate__(self, state: object) -> None:
        if not self.is_open:
            raise AttributeError("a pickle cannot change what a call has made")
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.made_from = state if isinstance(state, tuple) else (state,)


class Listed(pickle._Unpickler):
    """`source` says in an error which file it is. In Python, not C, since here tuples can be replaced."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, file: BinaryIO, source: str) -> None:
        super().__init__(file)
        self._source = source


def _flat(load_tuple: Callable[[Any], None]) -> Callable[[Any], None]:
    def load(unpickler: Any) -> None:
        load_tuple(unpickler)
        unpickler.stack[-1] = FlatKey(unpickler.stack[-1])

    return load


for _opcode in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3):
    Listed.dispatch[_opcode[0]] = _flat(Listed.dispatch[_opcode[0]])


class _Records(Listed):
    """Makes stand-ins for the objects of torch's index, and no others."""

    def find_class(self, module: str, name: str) -> object:
        module = "pathlib" if module == "pathlib._local" else module  # as Python 3.13 calls it
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if (module, name) in _KNOWN:
            return Record
        if module == "torch" and _TORCH_VALUES.fullmatch(name):
            return name
        raise unknown(self._source, f"{module}.{name}")


@dataclass(frozen=True)
class Stored:
    """A chunk of a tensor as it lies on the disk: `length` bytes of `file` from `offset` on are an archive of torch's."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class GlobalTensor:
    """`dtype` as torch names it, without `torch.`."""

    shape: tuple[int, ...]
    dtype: str
    chunks: list[Stored]


# What is no tensor: file, offset, length.
Objects = Mapping[str, tuple[str, int, int]]


def read_metadata(folder: Path) -> Metadata:
    """The index of a distributed checkpoint as torch's objects, without what the ranks planned when they wrote it.

    Raises:
        UnpickleError: it names something else than torch's classes for it, is damaged, or points at files outside the folder.
    """
    record = _read(folder)
    with _damage(folder):
        metadata = _as_torch(*_contents(record))
    if hasattr(record, "mcore_data"):  # plain data, which Megatron-Core keeps beside torch's
        metadata.mcore_data = record.mcore_data  # type: ignore[attr-defined]
    return metadata


def read_tensors(folder: Path) -> dict[str, GlobalTensor]:
    """Its tensors by name, without torch.

    Raises:
        UnpickleError: as `read_metadata`.
    """
    record = _read(folder)
    with _damage(folder):
        return _contents(record)[0]


def write(folder: Path, tensors: Mapping[str, GlobalTensor], objects: Objects) -> None:
    """Writes `.metadata`, by torch's classes."""
    (folder / METADATA).write_bytes(pickle.dumps(_as_torch(tensors, objects)))


def _as_torch(tensors: Mapping[str, GlobalTensor], objects: Objects) -> Metadata:
    import torch
    from torch.distributed.checkpoint import metadata as dcp

    from megatron_rl.seams.torch_dist import StorageInfo

    entries: dict[str, dcp.STORAGE_TYPES] = {name: dcp.BytesStorageMetadata() for name in objects}
    storage = {dcp.MetadataIndex(name): StorageInfo(*stored) for name, stored in objects.items()}
    for name, tensor in tensors.items():
        chunks = [dcp.ChunkStorageMetadata(torch.Size(c.start), torch.Size(c.size)) for c in tensor.chunks]
        properties = dcp.TensorProperties(dtype=getattr(torch, tensor.dtype))
        entries[name] = dcp.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        for chunk in tensor.chunks:
            index = dcp.MetadataIndex(name, torch.Size(chunk.start))
            storage[index] = StorageInfo(chunk.file, chunk.offset, chunk.length)
    return dcp.Metadata(entries, storage_data=storage)


def _contents(record: Any) -> tuple[dict[str, GlobalTensor], Objects]:
    """Checked values of an index that was read as records."""
    tensors: dict[str, GlobalTensor] = {}
    objects: dict[str, tuple[str, int, int]] = {}
    sizes: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
    entries = record.state_dict_metadata
    for name, entry in entries.items():
        if hasattr(entry, "chunks"):
            tensors[_text(name)] = GlobalTensor(_whole(entry.size), _dtype(entry), [])
            sizes |= {(name, _whole(chunk.offsets)): _whole(chunk.sizes) for chunk in entry.chunks}
    for index, info in record.storage_data.items():
        name, (offset, length) = _text(index.fqn), _whole([info.offset, info.length])
        if hasattr(entries[name], "chunks"):
            start = _whole(index.offset)
            size = sizes.pop((name, start))
            tensors[name].chunks.append(Stored(start, size, info.relative_path, offset, length))
        else:
            objects[name] = info.relative_path, offset, length
    if sizes:  # torch would leave that part of a tensor as it is
        name, start = next(iter(sizes))
        raise LookupError(f"it does not say where the chunk at {start} of {name} lies")
    return tensors, objects


def _read(folder: Path) -> Any:
    """The index as records."""
    path = folder / METADATA
    try:
        record = _Records(io.BytesIO(path.read_bytes()), str(path)).load()
    except UnpickleError:
        raise
    except DAMAGE as error:
        raise UnpickleError(f"{path} cannot be read: {error!r}") from error
    entries, places = getattr(record, "state_dict_metadata", None), getattr(record, "storage_data", None)
    if not (isinstance(entries, dict) and isinstance(places, dict)):
        raise UnpickleError(f"{path} cannot be read: it is not the index of a distributed checkpoint")
    for info in places.values():
        name = getattr(info, "relative_path", None)
        if not isinstance(name, str):
            raise UnpickleError(f"{path} is damaged: a {type(name).__name__} in the place of a file's name")
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise UnpickleError(f"{path} points at a file outside the checkpoint: {name!r}")
        if getattr(info, "transform_descriptors", None):
            raise UnpickleError(f"{path}: {name} is stored in transformed form ({METADATA}), which is not read")
    return record


@contextlib.contextmanager
def _damage(folder: Path) -> Iterator[None]:
    try:
        yield
    except (AttributeError, LookupError, TypeError, OverflowError) as error:  # its parts do not go together
        raise UnpickleError(f"{folder / METADATA} is damaged: {error!r}") from error


def _whole(values: Iterable[object]) -> tuple[int, ...]:
    """TypeError unless all are whole numbers."""
    numbers = tuple(values)
    for value in numbers:
        if type(value) is not int:
            raise TypeError(f"a {type(value).__name__} in the place of a whole number")
    return numbers  # type: ignore[return-value]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} in the place of a name")
    return value


def _dtype(entry: Any) -> str:
    name = _text(entry.properties.made_from[0])
    if _DTYPES.fullmatch(name) is None:
        raise TypeError(f"{name!r:.80} in the place of a dtype")
    return name


def unknown(source: str, name: str) -> UnpickleError:
    return UnpickleError(
        f"{source} names {name}, which is not one of the classes that a checkpoint is made of: reading the file freely could "
        "run any code. Nothing was run; do not use checkpoints from where this one came from"
    )
