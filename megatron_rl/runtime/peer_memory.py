"""Other processes' memory on the same host (Linux's `process_vm_readv`): one copy, no file, nothing that outlives a process.

The kernel allows it to the processes of one user, unless a container's seccomp profile forbids the call.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from megatron_rl.runtime.distributed import ProcessGrid

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)  # <sys/prctl.h>


class _Span(ctypes.Structure):
    """<sys/uio.h>'s iovec."""

    _fields_ = (("begin", ctypes.c_void_p), ("size", ctypes.c_size_t))


class Room:
    """Memory that is kept for the next use: to touch new pages takes longer than to copy."""

    def __init__(self) -> None:
        self._renew(0)

    def take(self, size: int) -> np.ndarray:
        """uint8 [size]: what was taken before, or new memory where that is too small, or where an array still views it."""
        if len(self._memory) < size or sys.getrefcount(self._memory) > self._unused:
            self._renew(size)
        return self._memory[:size]

    def _renew(self, size: int) -> None:
        self._memory = np.empty(size, dtype=np.uint8)
        self._unused = sys.getrefcount(self._memory)  # a view holds a reference to the array whose memory it is


@dataclass
class Neighbours:
    """The ranks of this host, which read one another's memory.

    Every rank has a board, of which the others know the address: how often it has gone on, and the address of what it shows.

    Attributes:
        boards: process and address, by rank.
        own: this rank's: int64 [2].
        shows: memory of this rank, for what others read.
        reads: memory of this rank, for what it reads of others.
    """

    boards: dict[int, tuple[int, int]]
    own: np.ndarray
    shows: Room = field(default_factory=Room)
    reads: Room = field(default_factory=Room)

    def show(self, what: np.ndarray) -> None:
        """What others may read now; the caller keeps it, unchanged, until all of them have gone on."""
        self.own[1] = what.ctypes.data
        self.go_on()

    def go_on(self) -> None:
        self.own[0] += 1

    def shown(self, rank: int, count: int) -> np.ndarray:
        """int64 [count] that another rank shows.

        Raises:
            OSError: as `read`.
        """
        what = np.empty(count, dtype=np.int64)
        self.read(rank, int(self._board(rank)[1]), what)
        return what

    def read(self, rank: int, address: int, into: np.ndarray) -> None:
        """Fills an array, contiguous in memory, with the bytes at an address of another rank.

        Raises:
            OSError: it has ended, or the kernel does not allow it.
        """
        _read(self.boards[rank][0], address, into)

    def behind(self) -> tuple[int, str] | None:
        """A rank that has gone on less often than this one, and what is known of it; one that has ended before any other."""
        late = None
        for rank in self.boards:
            try:
                came = self._board(rank)[0] >= self.own[0]
            except OSError as error:
                return rank, str(error)
            if late is None and not came:
                late = rank, "it did not come"
        return late

    def _board(self, rank: int) -> np.ndarray:
        board = np.empty_like(self.own)
        self.read(rank, self.boards[rank][1], board)
        return board


def find(grid: ProcessGrid) -> tuple[Neighbours | None, str | None]:
    """This rank's neighbours; on all ranks None where each has a host to itself, or where some of one host cannot read one
    another's memory: then also why. Every rank calls it; each tries it on a random word of each other."""
    _LIBC.prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)  # Yama, where there is one, allows parents only unless it is asked
    own, word = np.zeros(2, dtype=np.int64), np.frombuffer(os.urandom(16), dtype=np.uint8)
    here = problem = None
    try:
        here = _host()
    except OSError as error:
        problem = f"rank {grid.rank} does not know its host: {error}"
    told = grid.all_gather((here, os.getpid(), own.ctypes.data, word.ctypes.data, word.tobytes()))
    found, boards = np.empty_like(word), dict[int, tuple[int, int]]()
    for rank, (host, process, board, address, expected) in enumerate(told):
        if rank == grid.rank or here is None or host != here:
            continue
        boards[rank] = process, board
        try:
            _read(process, address, found)
            if found.tobytes() != expected:
                problem = f"rank {grid.rank} finds another process in place of rank {rank}'s"
        except OSError as error:
            problem = f"rank {grid.rank} asked for rank {rank}'s: {error}"
    problem = next(filter(None, grid.all_gather(problem)), None)
    alone = len({host for host, *_ in told}) == grid.world
    return (None if alone or problem else Neighbours(boards, own)), problem


def _host() -> tuple[str, str]:
    """What processes that know one another by the same ids have in common: the kernel that runs, and the namespace."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(), str(Path("/proc/self/ns/pid").readlink())


def _read(process: int, address: int, into: np.ndarray) -> None:
    done, size = 0, into.nbytes
    while done < size:  # at most 2 GiB at a time
        here, there = _Span(into.ctypes.data + done, size - done), _Span(address + done, size - done)
        count = _LIBC.process_vm_readv(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"reading the memory of process {process}: {os.strerror(number)}")
        done += count
