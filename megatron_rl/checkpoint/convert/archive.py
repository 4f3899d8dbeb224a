"""The zip archives in which torch saves a tensor, written and read without torch.

The file formats are those of `torch.save` and of PKWARE's APPNOTE. The values' CRC32 is left out (0), as by
`torch.serialization.set_crc32_options(False)`: they have a BLAKE3 checksum, and torch does not compare it.
"""

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

from megatron_rl.checkpoint.index import UnpickleError, number, text, tuple_of
from megatron_rl.weights.files import Bits

_ALIGNMENT = 64  # of a record in its archive
_LIMIT = 2**32 - 1  # what 32 bits of a plain zip can say; larger numbers stand in an extension
_STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
}
_DTYPES = {storage: dtype for dtype, storage in _STORAGES.items()}
# What is raised for bytes that are no archive of a tensor.
DAMAGE = (zipfile.BadZipFile, struct.error, RuntimeError, zlib.error)


def around(dtype: str, size: Sequence[int], itemsize: int) -> tuple[bytes, bytes]:
    """What precedes and what follows the bytes of a contiguous tensor in its archive."""
    count = math.prod(size)
    stride = _strides(size)
    storage = tuple_of(text("storage"), f"ctorch\n{_STORAGES[dtype]}\n".encode(), text("0"), text("cpu"), number(count))
    values = tuple_of(
        storage + b"Q",
        number(0),
        tuple_of(*map(number, size)),
        tuple_of(*map(number, stride)),
        b"\x89",
        b"ccollections\nOrderedDict\n)R",
    )
    return _archive(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + values + b"R.", count * itemsize)


def _strides(size: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(size[axis + 1 :]) for axis in range(len(size)))


def of_object(plain: object) -> bytes:
    """The archive of what holds no tensor."""
    head, tail = _archive(pickle.dumps(plain, 2), None)
    return head + tail


def _archive(data: bytes, payload: int | None) -> tuple[bytes, bytes]:
    """An archive up to the record with the values, of `payload` bytes, and from its end on."""
    head, central = b"", b""
    records = [("data.pkl", data), ("byteorder", b"little"), ("version", b"3\n")]
    records += [] if payload is None else [("data/0", b"")]
    for name, content in records:
        size = payload if payload is not None and name == "data/0" else len(content)
        path, offset, wide = f"archive/{name}".encode(), len(head), size >= _LIMIT
        sizes = struct.pack("<2H2Q", 1, 16, size, size) if wide else b""
        padding = -(offset + 30 + len(path) + len(sizes) + 4) % _ALIGNMENT
        extra = sizes + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        about = struct.pack("<5H3L", 45, 0x800, 0, 0, 0, zlib.crc32(content), *[_LIMIT if wide else size] * 2)
        head += b"PK\3\4" + about + struct.pack("<2H", len(path), len(extra)) + path + extra + content
        central += (
            b"PK\1\2\0\0" + about + struct.pack("<5H2L", len(path), len(sizes), 0, 0, 0, 0, offset) + path + sizes
        )
    at = len(head) + (payload or 0)
    end = b""
    if at >= _LIMIT:
        end += b"PK\6\6" + struct.pack("<Q2H2L4Q", 44, 45, 45, 0, 0, *[len(records)] * 2, len(central), at)
        end += b"PK\6\7" + struct.pack("<LQL", 0, at + len(central), 1)
    end += b"PK\5\6" + struct.pack("<4H2LH", 0, 0, *[len(records)] * 2, len(central), min(at, _LIMIT), 0)
    return head, central + end


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
