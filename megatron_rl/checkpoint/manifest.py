"""The manifest of a checkpoint, and the verification of its files. Needs no torch.

`manifest.json` lists every file with its size, and with its checksum where no tensors are in it; who wrote it, from which
recipe, for which model and layout. `tensors.json` says of every piece of every tensor in which file it lies, where, and its
checksum: damage is named by file and tensor. Checksums are BLAKE3, cut to 128 bits.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NotRequired, TypedDict

from blake3 import blake3

from megatron_rl.base.messages import errors_named
from megatron_rl.runtime.disk import sync_tree

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MANIFEST, TENSORS = "manifest.json", "tensors.json"
FORMAT = 1
DIGEST_BYTES = 16
_BLOCK = 2**22
_RANK = re.compile(r"__(\d+)_")  # in the name of a file with tensors
Row = tuple[str, Sequence[int], str, int, int, str]


class FileEntry(TypedDict):
    bytes: int
    blake3: NotRequired[str]  # of a file without tensors


class Manifest(TypedDict):
    """`manifest.json`, without its own checksum. What is not required depends on who wrote it."""

    format: int
    files: dict[str, FileEntry]
    version: NotRequired[str]
    kind: NotRequired[str]  # `conversion`
    task: NotRequired[dict[str, object]]  # of a conversion: what the result depends on
    model: NotRequired[dict[str, object]]  # of a training checkpoint: config.json
    adapters: NotRequired[Any]  # what `trainer.adapter_facts` says of a training checkpoint; null: there are none


@dataclass(frozen=True)
class StoredChunk:
    """A part of one tensor (or a pickled object) as it lies on the disk."""

    name: str  # the tensor's
    start: tuple[int, ...]  # of the part in the whole tensor, per dimension; () for an object
    file: str
    offset: int  # of its bytes in the file
    length: int
    digest: str  # their checksum

    def row(self) -> Row:
        return self.name, self.start, self.file, self.offset, self.length, self.digest

    @classmethod
    def of(cls, row: Row) -> StoredChunk:
        name, start, file, offset, length, digest = row
        return cls(name, tuple(start), file, offset, length, digest)


@dataclass(frozen=True)
class TensorInfo:
    """A whole tensor. `dtype` as torch names it, without `torch.`; `object` (and no shape) for what is not a tensor."""

    shape: tuple[int, ...]
    dtype: str


def digest(data: bytes | memoryview) -> str:
    return blake3(data).hexdigest(length=DIGEST_BYTES)


class Hashing:
    """A file being written; knows where it stands and the checksum since `begin`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.position = file, 0
        self.failure: OSError | None = None  # torch's writer does not pass on what went wrong here
        self._hash = blake3()

    def begin(self) -> None:
        self._hash = blake3()

    def digest(self) -> str:
        return self._hash.hexdigest(length=DIGEST_BYTES)

    def write(self, data: ReadableBuffer) -> int:
        view = memoryview(data).cast("B") if not isinstance(data, bytes) else data
        try:
            self._file.write(view)
        except OSError as failure:
            self.failure = failure
            raise
        self._hash.update(view)
        self.position += len(view)
        return len(view)

    def flush(self) -> None:
        self._file.flush()


def write(
    folder: Path, about: Mapping[str, object], tensors: Mapping[str, TensorInfo], chunks: Sequence[StoredChunk]
) -> None:
    """Lists what lies in `folder`; the last thing to be written there. All of it is on the disk after that.

    Raises:
        OSError: a file cannot be written or read, or one with tensors is not there in its full length.
    """
    ends: dict[str, int] = {}
    for chunk in chunks:
        ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.offset + chunk.length)
    write_json(
        folder / TENSORS,
        {
            "tensors": {name: {"shape": list(t.shape), "dtype": t.dtype} for name, t in sorted(tensors.items())},
            "pieces": [chunk.row() for chunk in chunks],
        },
        indent=None,
    )
    files: dict[str, dict[str, object]] = {}
    (folder / MANIFEST).unlink(missing_ok=True)  # of a writer that was killed right after it
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        files[name] = {"bytes": path.stat().st_size}
        if name not in ends:
            files[name]["blake3"] = _digest_of(path)
    for name, end in ends.items():
        size = files[name]["bytes"] if name in files else 0
        if size != end:
            raise OSError(f"{folder / name} has {size} bytes, {end} were written")
    content = {"format": FORMAT, **about, "files": files}
    write_json(folder / MANIFEST, content | {"digest": _own_digest(content)})
    sync_tree(folder)


def read(folder: Path) -> Manifest:
    """The manifest.

    Raises:
        ValueError: it is missing, unreadable, damaged, or of a format this version does not know.
    """
    with errors_named(f"its {MANIFEST} cannot be read", OSError, ValueError):
        content = json.loads((folder / MANIFEST).read_bytes())
    found = content.get("format", 0) if isinstance(content, dict) else None
    if found != FORMAT:
        raise ValueError(f"its {MANIFEST} is of format {found}, and this version reads format {FORMAT}")
    own = content.pop("digest", None)
    if own != _own_digest(content):
        raise ValueError(f"its {MANIFEST} is damaged: its own checksum does not fit")
    return content


def read_tensors(folder: Path) -> tuple[dict[str, TensorInfo], list[StoredChunk]]:
    """Every tensor by name, and where its pieces lie. Raises ValueError: the index is missing or damaged."""
    with errors_named(f"its {TENSORS} cannot be read", OSError, ValueError, KeyError, TypeError, AttributeError):
        content = json.loads((folder / TENSORS).read_bytes())
        tensors = {name: TensorInfo(tuple(t["shape"]), t["dtype"]) for name, t in content["tensors"].items()}
        return tensors, [StoredChunk.of(row) for row in content["pieces"]]


def missing(folder: Path) -> str | None:
    """None where every file is there in its full length, otherwise what is wrong. Reads no tensor."""
    try:
        files = read(folder)["files"]
    except ValueError as error:
        return str(error)
    for name, about in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing{_held(folder, name, 0)}"
        size = path.stat().st_size
        if size != about["bytes"]:
            return f"{name} has {size} bytes, {about['bytes']} were written{_held(folder, name, size)}"
    return None


def verify(folder: Path, part: int = 0, parts: int = 1, skip_prefix: str | None = None) -> list[str]:
    """Reads everything and compares checksums: a sentence per damaged piece, with file and tensor; [] where all is well.

    Args:
        part, parts: look at one of so many shares of nearly equal size, so that ranks can divide the work.
        skip_prefix: tensors whose names begin so are not read.
    """
    problem = missing(folder)
    if problem is not None:
        return [problem]
    try:
        files = read(folder)["files"]
        if part == 0:
            listed = {name: entry["blake3"] for name, entry in files.items() if "blake3" in entry}
            if problems := [f"{name} is damaged" for name, own in listed.items() if _digest_of(folder / name) != own]:
                return problems
        tensors, chunks = read_tensors(folder)
    except ValueError as error:
        return [str(error)]
    except OSError as error:
        return [f"{error.filename} cannot be read ({error.strerror})"]
    problems = []
    for piece in _share([p for p in chunks if skip_prefix is None or not p.name.startswith(skip_prefix)], part, parts):
        problem = _compare(folder, piece)
        if problem is not None:
            problems.append(f"{piece.file} is damaged in tensor {piece.name} (bytes {piece.offset} and on): {problem}")
    if part == 0:
        problems += [f"tensor {name} has no data" for name in sorted(tensors.keys() - {piece.name for piece in chunks})]
    return problems


def _compare(folder: Path, chunk: StoredChunk) -> str | None:
    try:
        with open(folder / chunk.file, "rb") as file:
            found = digest_at(file, chunk.offset, chunk.length)
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    return None if found == chunk.digest else f"its checksum is {found}, {chunk.digest} was written"


def _share(chunks: Sequence[StoredChunk], part: int, parts: int) -> list[StoredChunk]:
    """The pieces whose middle lies in the `part`-th stretch of all bytes, in the order of the ranks that wrote them.

    A rank that loads at the layout of the save wants what the rank of its number has written. So most of what it loads next
    is what a rank of its own node has read here, and comes out of the node's memory.
    """
    total, before, own = sum(piece.length for piece in chunks), 0, []
    for piece in sorted(chunks, key=lambda piece: (_writer(piece.file), piece.file, piece.offset)):
        if (before + piece.length / 2) * parts // max(total, 1) == part:
            own.append(piece)
        before += piece.length
    return own


def _writer(file: str) -> int:
    """The rank that wrote a file; -1 where its name does not say."""
    found = _RANK.match(file)
    return -1 if found is None else int(found[1])


def _held(folder: Path, file: str, size: int) -> str:
    """Which tensors a file loses that ends after `size` bytes."""
    try:
        _, pieces = read_tensors(folder)
    except ValueError:
        return ""
    names = list(dict.fromkeys(p.name for p in pieces if p.file == file and p.offset + p.length > size))
    if not names:
        return ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"; it held tensor {names[0]}{more}"


def digests(folder: Path) -> dict[str, str]:
    """Checksum of every file in a folder, by name."""
    return {
        path.relative_to(folder).as_posix(): _digest_of(path) for path in sorted(folder.rglob("*")) if path.is_file()
    }


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return digest_at(file, 0, path.stat().st_size)


def digest_at(file: BinaryIO, offset: int, length: int) -> str:
    """Checksum of a stretch of a file, or of what there is of it."""
    hash_ = blake3()
    file.seek(offset)
    while length and (block := file.read(min(length, _BLOCK))):
        hash_.update(block)
        length -= len(block)
    return hash_.hexdigest(length=DIGEST_BYTES)


def _own_digest(content: Mapping[str, object]) -> str:
    return digest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def write_json(path: Path, content: object, indent: int | None = 1) -> None:
    """Writes and waits until it is on the disk."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=indent, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
