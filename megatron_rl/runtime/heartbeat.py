"""The heartbeat of this process: stage, step, phase, samples. In memory always; in a file where one is attached.

The other ranks, the launcher and `megatron-rl status` read the file when this process does not answer. The main thread
writes it in place at every change of phase, a thread of the watchdog at every beat. Deadlines are counted on an `AwakeClock`.
Readers compare the numbers of the beat at two looks, because clocks differ and may be set. Needs no torch.
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
from typing import TypedDict

from megatron_rl.runtime import process


class AwakeClock:
    """Seconds for which this process has run.

    `time.monotonic` ignores steps of the system clock, but it goes on while a process is stopped (SIGSTOP), while its
    container is frozen, and on some hosts while a virtual machine is suspended. This clock counts at most `longest` seconds
    between two ticks.

    One thread calls `tick`, more often than every `longest` seconds; any thread may call `read`.

    `source` gives seconds of a clock that never goes back.
    """

    def __init__(self, longest: float, source: Callable[[], float] = time.monotonic) -> None:
        self._longest, self._source = longest, source
        self._mark = (source(), 0.0)  # the source at the last tick, and what this clock showed; replaced as one object

    def read(self) -> float:
        then, seconds = self._mark
        return seconds + min(self._source() - then, self._longest)

    def tick(self) -> float:
        """Counts the time since the last tick; returns `read()`."""
        now = self._source()
        then, seconds = self._mark
        self._mark = (now, seconds + min(now - then, self._longest))
        return self._mark[1]


BETWEEN = "between phases"
START, END = "start", "end"  # before the first phase; after the last, where all went well
_SLOWEST_BEAT = 15.0  # seconds
_BEATS_PER_SECOND = 32.0  # of all ranks together: what a shared file system hardly notices
_SIZE = 4096  # bytes of a heartbeat: one page, written and read in one piece
_LONGEST_GAP = 10.0  # seconds, or four beats, between two ticks of the clock; after a longer gap the process was halted


class RankFacts(TypedDict, total=False):
    """The trainer's additions to a heartbeat (the first three) and to a post-mortem."""

    collective: str | None  # the newest
    pending: str | None  # the oldest that this rank has entered and not left
    host_gib: float
    collectives: list[str]
    memory_gib: dict[str, float]


class Beat(RankFacts):
    """A rank's heartbeat, as its file holds it."""

    rank: int
    world: int
    host: str
    pid: int
    started: int  # `process.started`
    space: str  # `process.space`
    time: float  # for people; nothing is decided by it
    beat: int
    stage: str
    step: int
    steps: int
    phase: str
    seconds: float  # in this phase
    left: float | None  # seconds until a deadline passes; None without one
    entered: int  # phases so far


class Dump(Beat, total=False):
    """A rank's part of a post-mortem."""

    samples: list[str]
    samples_in_all: int
    at: str  # where its main thread is
    error: str
    versions: dict[str, str]
    memory: list[str]


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
    since: float  # on the process's clock, as is `deadline`
    deadline: float  # inf without a watchdog
    limit: float  # seconds


class Heartbeat:
    """Stage, step and phase of this process. Phases nest; the innermost is the one that is shown."""

    def __init__(self) -> None:
        self.rank, self.world, self.host = 0, 1, socket.gethostname()
        self.stage, self.step, self.steps = "", 0, 0
        self.entered = 0  # phases so far. All ranks go through the same ones: the smallest number is furthest behind
        self.samples: Sequence[str] = ()  # ids of the samples that this rank works on
        self.memory_peaks: Callable[[], Mapping[str, Mapping[str, float]]] = dict  # GiB per phase, on host and device
        self.facts = RankFacts()  # what the watchdog adds
        self.clock = AwakeClock(float("inf"))
        self._deadlines: Deadlines | None = None
        self._known: set[str] = set()
        self._stack = [self._entry(START)]
        self._file: int | None = None
        self._beat = 0
        self._started = process.started(os.getpid()) or 0

    def attach(
        self, folder: Path, rank: int, world: int, deadlines: Deadlines | None, clock: AwakeClock | None = None
    ) -> None:
        """From here on `folder/rank_<r>.json` shows what this process does; every phase has a deadline, if any are given.
        `clock`: the caller ticks it at every beat; None: one that counts a gap as ten seconds, or four beats, at most.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.rank, self.world, self._deadlines = rank, world, deadlines
        self.clock = clock or AwakeClock(max(_LONGEST_GAP, 4 * beat_interval(world)))
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
        now = self.clock.read()
        if self._deadlines is None:
            return _Entry(phase, now, float("inf"), float("inf"))
        limit = self._deadlines.of(phase, phase not in self._known)
        return _Entry(phase, now, now + limit, limit)

    # ----------------------------------------------------------------------------------------------------------- reading
    @property
    def phase(self) -> str:
        return self._stack[-1].phase

    def overdue(self) -> tuple[str, float] | None:
        """The phase that is past its deadline, and the deadline in seconds."""
        now = self.clock.read()
        return next(((entry.phase, entry.limit) for entry in self._current() if now > entry.deadline), None)

    def _current(self) -> list[_Entry]:
        """The open phases; between two, that."""
        return self._stack[1:] or self._stack

    def record(self) -> Beat:
        top = self._stack[-1]
        now = self.clock.read()
        seconds_left = min(entry.deadline for entry in self._current()) - now
        return {
            "rank": self.rank,
            "world": self.world,
            "host": self.host,
            "pid": os.getpid(),
            "started": self._started,
            "space": process.space(),
            "time": round(time.time(), 3),
            "beat": self._beat,
            "stage": self.stage,
            "step": self.step,
            "steps": self.steps,
            "phase": top.phase,
            "seconds": round(now - top.since, 3),
            "left": None if seconds_left == float("inf") else round(seconds_left, 3),
            "entered": self.entered,
            **self.facts,
        }

    def write(self) -> None:
        """Writes to the file, if there is one: one system call, into the page cache."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk is reported by what has something to save
                os.pwrite(self._file, json.dumps(self.record()).encode()[:_SIZE].ljust(_SIZE), 0)

    def beat(self) -> None:
        """The watchdog's: shows that this process still runs."""
        self._beat += 1
        self.write()

    def sync(self) -> None:
        """Brings the file to where other nodes see it, for as long as that takes."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.fsync(self._file)


HEARTBEAT = Heartbeat()  # this process's


def heartbeats(folder: Path) -> dict[int, Beat]:
    """Rank -> heartbeat, of every rank that has written one."""
    beats = [beat for path in folder.glob("rank_*.json") if (beat := read_heartbeat(path)) is not None]
    return {beat["rank"]: beat for beat in sorted(beats, key=lambda beat: beat["rank"])}


def read_heartbeat(path: Path) -> Beat | None:
    """None if missing; retries a file caught mid-write."""
    for _ in range(3):
        try:
            return json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            time.sleep(0.002)
    return None
