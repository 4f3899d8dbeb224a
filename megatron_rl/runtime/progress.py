"""What this process is doing: stage, step, phase, samples. In memory always; in a heartbeat file where one is attached.

The file is what others go by when this process cannot speak any more: the other ranks, the launcher, `megatron-rl status`.
It is written in place, without a rename, on every change of phase by whoever changes it and at every beat by the watchdog.
Needs no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BETWEEN = "between phases"
START, END = "start", "end"  # before the first phase; after the last, where all went well
_SLOWEST_BEAT = 15.0  # seconds
_BEATS_PER_SECOND = 32.0  # of all ranks together: what a shared file system hardly notices
_SIZE = 4096  # bytes of a heartbeat: one page, written and read in one piece


def beat_interval(world: int) -> float:
    """Seconds between two heartbeats of one rank."""
    return min(_SLOWEST_BEAT, max(1.0, world / _BEATS_PER_SECOND))


@dataclass(frozen=True)
class Deadlines:
    """Seconds that a phase may take. The first time it runs in a process it may take `first` longer."""

    default: float
    phases: Mapping[str, float]
    first: float = 0.0

    def of(self, phase: str, is_first: bool) -> float:
        return self.phases.get(phase, self.default) + (self.first if is_first else 0.0)


@dataclass
class _Entry:
    phase: str
    since: float  # time.time()
    deadline: float  # time.monotonic(); inf without a watchdog
    limit: float  # seconds


class Progress:
    """Stage, step and phase of this process. Phases nest; the innermost is the one that is shown."""

    def __init__(self) -> None:
        self.rank, self.world, self.host = 0, 1, socket.gethostname()
        self.stage, self.step, self.steps = "", 0, 0
        self.entered = (
            0  # phases so far: every rank goes through the same ones, so the smallest number is the furthest behind
        )
        self.samples: Sequence[str] = ()  # ids of the samples that this rank works on
        self.memory_parts: Callable[[], Mapping[str, float]] = dict  # what holds the memory, in GiB
        self.memory_peaks: Callable[[], Mapping[str, Mapping[str, float]]] = dict  # GiB per phase, on host and device
        self.last: Mapping[str, Any] = {}  # what the watchdog adds: collective, memory
        self._deadlines: Deadlines | None = None
        self._known: set[str] = set()
        self._stack = [self._entry(START)]
        self._file: int | None = None
        self._beat = 0

    def attach(self, folder: Path, rank: int, world: int, deadlines: Deadlines | None) -> None:
        """From here on `folder/rank_<r>.json` shows what this process does; every phase has a deadline, if any are given."""
        folder.mkdir(parents=True, exist_ok=True)
        self.rank, self.world, self._deadlines = rank, world, deadlines
        self._file = os.open(folder / f"rank_{rank}.json", os.O_RDWR | os.O_CREAT, 0o644)
        os.pwrite(self._file, b" " * _SIZE, 0)
        self._known.clear()
        self._stack = [self._entry(entry.phase) for entry in self._stack]
        self.write()

    def detach(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    # ----------------------------------------------------------------------------------------------------------- changes
    def begin(self, stage: str, step: int, steps: int) -> None:
        """A stage (SFT, RL, evaluation) of `steps` steps, `step` of which are done."""
        self.stage, self.step, self.steps = stage, step, steps
        self._stack[0] = self._entry(BETWEEN)
        self.write()

    def enter(self, phase: str) -> None:
        self.entered += 1
        self._stack.append(self._entry(phase))
        self.write()

    def leave(self) -> None:
        self._known.add(self._stack.pop().phase)
        if len(self._stack) == 1:
            self.samples = ()
            self._stack[0] = self._entry(self._stack[0].phase)  # the time between two phases starts anew
        self.write()

    def finish(self) -> None:
        """Nothing more to wait for: what comes is the end of the process."""
        self._stack = [self._entry(END)]
        self.write()

    def _entry(self, phase: str) -> _Entry:
        if self._deadlines is None:
            return _Entry(phase, time.time(), float("inf"), float("inf"))
        limit = self._deadlines.of(phase, phase not in self._known)
        return _Entry(phase, time.time(), time.monotonic() + limit, limit)

    # ----------------------------------------------------------------------------------------------------------- reading
    @property
    def phase(self) -> str:
        return self._stack[-1].phase

    def overdue(self) -> tuple[str, float] | None:
        """The phase that is past its deadline, and the deadline in seconds."""
        now = time.monotonic()
        return next(((entry.phase, entry.limit) for entry in self._current() if now > entry.deadline), None)

    def _current(self) -> list[_Entry]:
        """The open phases; between two, that."""
        return self._stack[1:] or self._stack

    def record(self) -> dict[str, Any]:
        """The heartbeat: plain data."""
        top = self._stack[-1]
        left = min(entry.deadline for entry in self._current()) - time.monotonic()
        now = time.time()
        return {
            "rank": self.rank,
            "world": self.world,
            "host": self.host,
            "pid": os.getpid(),
            "time": round(now, 3),
            "beat": self._beat,
            "stage": self.stage,
            "step": self.step,
            "steps": self.steps,
            "phase": top.phase,
            "since": round(top.since, 3),
            "deadline": None if left == float("inf") else round(now + left, 3),
            "entered": self.entered,
            **self.last,
        }

    def write(self) -> None:
        """To the file, if there is one: one system call, into the page cache."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk is for whoever has something to save
                os.pwrite(self._file, json.dumps(self.record()).encode()[:_SIZE].ljust(_SIZE), 0)

    def beat(self) -> None:
        """The watchdog's: shows that this process still runs, and brings the file to where other nodes see it."""
        self._beat += 1
        self.write()
        if self._file is not None:
            os.fsync(self._file)


PROGRESS = Progress()  # this process's


def heartbeats(folder: Path) -> dict[int, dict[str, Any]]:
    """Rank -> heartbeat, of every rank that has written one."""
    records = (read_heartbeat(path) for path in folder.glob("rank_*.json"))
    return {record["rank"]: record for record in sorted(filter(None, records), key=lambda record: record["rank"])}


def read_heartbeat(path: Path) -> dict[str, Any] | None:
    """None where there is none. One that is being written is read again."""
    for _ in range(3):
        try:
            return json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            time.sleep(0.002)
    return None
