"""Durable and atomic writes, archives, and sizes as text."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO


def size_text(num_bytes: float) -> str:
    """A size to three digits in the unit that shows it: `0 bytes`, `640 bytes`, `1.50 KiB`, `23.4 MiB`, `70.1 GiB`."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} bytes"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        num_bytes /= 1024
        if num_bytes < 999.5 or unit == "TiB":
            break
    return f"{num_bytes:.{2 if num_bytes < 9.995 else 1 if num_bytes < 99.95 else 0}f} {unit}"


def sync(path: Path) -> None:
    """fsync of a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        sync(path)


def text_file(path: Path) -> TextIO:
    """A new file in UTF-8 for text of users and models. Half a surrogate pair, which JSON may hold and UTF-8 may not, is
    written as its escape, such as `\\ud83d`: in a file of JSON that is the same text."""
    return path.open("w", encoding="utf-8", errors="backslashreplace")


def replace(path: Path, text: str) -> None:
    """Writes a file in one move, as readable as the umask makes a new one: a reader finds the old text or the new one.

    Half a surrogate pair is written as in `text_file`.
    """
    temporary = path.parent / f".{path.name}.{secrets.token_hex(6)}"  # `with_name` refuses `.` as no OSError
    try:
        with temporary.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def json_lines(path: Path) -> Iterator[Any]:
    """A file's objects, none where it is missing; ends at a last line that is being written, or that a kill cut short."""
    for line in path.read_bytes().split(b"\n") if path.is_file() else ():
        try:
            yield json.loads(line)
        except ValueError:
            return


def make_inside(home: Path, folder: Path) -> None:
    """Makes `folder` and what is missing between it and `home`, but never `home`, which may have been removed or renamed.

    Raises:
        OSError: among them FileNotFoundError, where `home` is not there.
    """
    for part in reversed([folder, *folder.parents][: len(folder.relative_to(home).parts)]):
        part.mkdir(exist_ok=True)


def next_previous(folder: Path) -> Path:
    """`folder/previous_<k>`, which is not there yet, nor is a later one."""
    numbers = [path.name.removeprefix("previous_") for path in folder.glob("previous_*")]
    return folder / f"previous_{1 + max((int(number) for number in numbers if number.isdigit()), default=0)}"
