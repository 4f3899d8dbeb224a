"""The zip archive in which torch saves a tensor, read without torch: where its values are, not what they are."""

from __future__ import annotations

import io
import math
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from megatron_rl.checkpoint.index import UnpickleError
from megatron_rl.weights.files import Bits

_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
# What is raised for bytes that are no archive of a tensor.
DAMAGE = (zipfile.BadZipFile, struct.error, RuntimeError, zlib.error)


def _strides(size: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(size[axis + 1 :]) for axis in range(len(size)))


@dataclass(frozen=True)
class Saved:
    """A tensor in its archive.

    Attributes:
        dtype: as torch names it.
        offset, nbytes: where the archive holds the values of its storage.
        first, size, stride: which of these the tensor is, in values.
    """

    dtype: str
    offset: int
    nbytes: int
    first: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def is_plain(self) -> bool:
        """Whether the tensor is all of its storage, row after row."""
        return self.first == 0 and self.stride == _strides(self.size) and self.extent == math.prod(self.size)

    @property
    def extent(self) -> int:
        """Where the tensor ends in its storage, in values."""
        if 0 in self.size:
            return self.first
        return self.first + 1 + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))

    def check(self, length: int, itemsize: int) -> None:
        """Raises ValueError where it is more than its storage, or that more than the archive, which has `length` bytes."""
        if min((self.first, self.offset, *self.size, *self.stride)) < 0:
            raise ValueError("a size or place is negative")
        if self.extent * itemsize > self.nbytes or self.offset + self.nbytes > length or self.nbytes % itemsize:
            raise ValueError("its values end beyond their record")
        if self.is_plain and self.nbytes != self.extent * itemsize:
            raise ValueError("its record holds more than its values")

    def strided(self, storage: Bits) -> Bits:
        """Its values in their order."""
        steps = [step * storage.itemsize for step in self.stride]
        return np.lib.stride_tricks.as_strided(storage[self.first :], self.size, steps).reshape(-1)


class _Tensor(pickle.Unpickler):
    """Makes what describes one tensor, and nothing else."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3")):
            return lambda *about: about
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda about, *_: about
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if module == "torch" and re.fullmatch(r"[a-z]\w*\d\w*", name):
            return name  # a dtype
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return ""
        raise UnpickleError(f"it names {module}.{name}, which has no place in a tensor")

    def persistent_load(self, about: object) -> object:
        return about


def read(file: BinaryIO) -> Saved:
    """Where the values of an archive's tensor are.

    Raises:
        ValueError, or one of `DAMAGE`, or what a pickle raises: it is damaged, or no tensor.
    """
    with zipfile.ZipFile(file) as archive:
        records = {record.filename.partition("/")[2]: record for record in archive.infolist()}
    data = records["data.pkl"]
    file.seek(_begin(file, data))
    found: Any = _Tensor(io.BytesIO(file.read(data.file_size))).load()
    (kind, dtype, key, _, _), first, size, stride, _, _, *rest = found
    dtype = rest[0] if rest else dtype
    if kind != "storage" or not isinstance(dtype, str):
        raise ValueError(f"it is a {kind!r} of {dtype!r}")
    values = records[f"data/{key}"]
    order = records.get("byteorder")
    if order is not None:
        file.seek(_begin(file, order))
        if file.read(order.file_size) != b"little":
            raise ValueError("its values are not in the byte order of this machine")
    return Saved(dtype, _begin(file, values), values.file_size, int(first), tuple(size), tuple(stride))


def _begin(file: BinaryIO, record: zipfile.ZipInfo) -> int:
    """Where a record's bytes begin."""
    if record.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{record.filename} is compressed")
    file.seek(record.header_offset)
    name, extra = struct.unpack("<26x2H", file.read(30))
    return record.header_offset + 30 + int(name) + int(extra)
