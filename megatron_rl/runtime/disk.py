"""What has to be on the disk before the next thing happens, and what is put aside there."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Waits until a folder and everything in it is on the disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def next_previous(folder: Path) -> Path:
    """`folder/previous_<k>`, which is not there yet, nor is a later one."""
    numbers = [path.name.removeprefix("previous_") for path in folder.glob("previous_*")]
    return folder / f"previous_{1 + max((int(number) for number in numbers if number.isdigit()), default=0)}"
