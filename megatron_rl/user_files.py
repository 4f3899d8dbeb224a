"""Files that a recipe or a command names: regular ones only, since a pipe or a device is waited for without end."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def require_regular(path: str | os.PathLike[str]) -> None:
    """Links are followed.

    Raises:
        ValueError: the path is a folder, a pipe, a device or a socket, or no path at all; it says which.
        OSError: there is nothing, or it cannot be looked at.
    """
    mode = os.stat(path).st_mode
    for is_kind, kind in _KINDS:
        if is_kind(mode):
            remedy = "" if kind == "a folder" else "; write what it gives into a file, and name that"
            raise ValueError(f"{Path(path)} is {kind}, not a file{remedy}")


def read_text(path: str | os.PathLike[str], most_bytes: int) -> str:
    """The text of a regular file in UTF-8.

    Raises:
        ValueError: as above, or it is larger than `most_bytes`, or not UTF-8 (`UnicodeDecodeError`).
        OSError: it cannot be read.
    """
    require_regular(path)
    with open(path, "rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"{Path(path)} has more than {most_bytes:,} bytes")
    return data.decode("utf-8-sig")
