"""Stale names that a killed engine start leaves under /dev/shm and in the temporary folder, and their removal.

They are removed as soon as every rank has opened what they name. Until then every rank keeps a lock on them (flock: on a lock
file for the segments of a run, on the folder itself for sockets), which the kernel drops when the last process that has it
ends, also one in another container. The launcher removes this user's names without a lock at its start and at its end, and so
does an engine before it starts. Needs no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_rl.seams.vllm_segments import PREFIX, run_prefix

SHARED_MEMORY = Path("/dev/shm")
_SOCKETS = "mrl-sockets-"
_LOCK = re.compile(rf"{PREFIX}\d+\.lock")
_LONGEST = 48  # characters of a temporary folder: a socket's path has at most 107, and the rest of it takes 59


@contextlib.contextmanager
def claimed_segments() -> Iterator[None]:
    """Holds the lock of this run's segments: while entered, they are not stale."""
    path = SHARED_MEMORY / f"{run_prefix()}.lock"
    _, lock = _claim(lambda: path, os.O_RDWR | os.O_CREAT)
    try:
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def claimed_folder() -> Iterator[Path]:
    """A new folder for sockets, gone at the end."""
    parent = tempfile.gettempdir()
    parent = parent if len(parent) <= _LONGEST else "/tmp"
    folder, lock = _claim(lambda: Path(tempfile.mkdtemp(prefix=_SOCKETS, dir=parent)), os.O_RDONLY)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
        os.close(lock)


def remove_segments() -> None:
    """Unlinks this run's segments; processes that have opened them keep them."""
    prefix = run_prefix()
    for path in [*SHARED_MEMORY.glob(f"{prefix}-*"), SHARED_MEMORY / f"{prefix}.lock"]:  # the lock last
        path.unlink(missing_ok=True)


def remove_abandoned() -> list[Path]:
    """Removes the stale names of this user's killed runs; returns the paths. Those of running jobs stay."""
    removed: list[Path] = []
    for lock in _own(SHARED_MEMORY, PREFIX):
        if _LOCK.fullmatch(lock.name):
            with _exclusively(lock) as abandoned:
                if abandoned:
                    segments = _own(SHARED_MEMORY, f"{lock.stem}-")
                    removed += [path for path in [*segments, lock] if _unlink(path)]
    for parent in {tempfile.gettempdir(), "/tmp"}:
        for folder in _own(Path(parent), _SOCKETS):
            with _exclusively(folder) as abandoned:
                if abandoned and _remove_sockets(folder):
                    removed.append(folder)
    return removed


def _claim(make: Callable[[], Path], flags: int) -> tuple[Path, int]:
    """A path and an open file that holds a shared lock on it."""
    while True:
        path = make()
        try:
            lock = os.open(path, flags, 0o600)
        except FileNotFoundError:  # a new folder that another process has found unlocked
            continue
        fcntl.flock(lock, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), path.stat()):
                return path, lock
        os.close(lock)  # another process found it unlocked and has removed it


@contextlib.contextmanager
def _exclusively(path: Path) -> Iterator[bool]:
    """Whether a path is unlocked; the check itself holds the lock for an instant."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        abandoned = True
    except OSError:
        abandoned = False
    try:
        yield abandoned
    finally:
        os.close(lock)


def _own(folder: Path, prefix: str) -> list[Path]:
    """This user's entries whose names begin with a prefix."""
    found = []
    for path in folder.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.geteuid():
                found.append(path)
    return found


def _remove_sockets(folder: Path) -> bool:
    """Removes a folder that holds nothing but sockets; one with anything else is not an engine's."""
    with contextlib.suppress(OSError):
        entries = list(folder.iterdir())
        if not all(stat.S_ISSOCK(entry.lstat().st_mode) for entry in entries):
            return False
        for entry in entries:
            entry.unlink()
        folder.rmdir()
        return True
    return False


def _unlink(path: Path) -> bool:
    with contextlib.suppress(OSError):
        path.unlink()
        return True
    return False
