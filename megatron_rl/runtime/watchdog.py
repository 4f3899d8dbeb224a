"""Ends a run that stands still, and says where.

One thread per rank. It shows a heartbeat, and looks whether the phase this rank is in is past its deadline. The first rank
that is says so in the post-mortem folder; every other rank sees that at its next beat, adds its own stacks, and the lowest
rank that still answers compares all of them and says who is behind. Then all end with the exit code STALLED. A rank that
cannot answer (stopped, or on a dead node) is ended by its launcher.

The thread needs Python's lock. Where something holds it, a timer of faulthandler's, which does not, writes the stacks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from megatron_rl.runtime import exit_codes, postmortem
from megatron_rl.runtime.progress import PROGRESS, Deadlines, beat_interval, heartbeats

_PATIENCE = 10.0  # seconds to wait for the report of the rank that writes it


class Watchdog:
    """Watches this process from a thread of its own, from `start` to `stop`.

    Args:
        attempt: this attempt's log folder, the same on all ranks.
        rank, world: this process's place.
        deadlines: seconds per phase; None: heartbeats only.
        facts: what else a heartbeat and a post-mortem should have (collectives, memory); called in the thread.
    """

    def __init__(
        self,
        attempt: Path,
        rank: int,
        world: int,
        deadlines: Deadlines | None,
        facts: Callable[[bool], Mapping[str, Any]] = lambda full: {},
    ) -> None:
        self.attempt, self.folder = attempt, postmortem.folder_of(attempt)
        self._beats = postmortem.heartbeat_folder(attempt)
        self._deadlines, self._facts = deadlines, facts
        self._interval = beat_interval(world)
        self._rank, self._world = rank, world
        self._done = threading.Event()
        self._ending = threading.Lock()  # one stall is enough
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._stacks: IO[str] | None = None

    def start(self) -> None:
        PROGRESS.attach(self._beats, self._rank, self._world, self._deadlines)
        self._stacks = (self._beats / f"rank_{self._rank}.stacks").open("w+", encoding="utf-8")
        self._thread.start()

    def stop(self) -> None:
        """No deadline after this; the last heartbeat stays."""
        self._done.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2 * self._interval)
        faulthandler.cancel_dump_traceback_later()
        PROGRESS.detach()

    # ------------------------------------------------------------------------------------------------------------ thread
    def _run(self) -> None:
        while not self._done.wait(self._interval):
            self._arm()
            PROGRESS.last = self._facts(False)
            with contextlib.suppress(OSError):  # a full disk is not a stall; other ranks see the last beat
                PROGRESS.beat()
            if self._deadlines is None:
                continue
            late = PROGRESS.overdue()
            if postmortem.stalled(self.folder) is not None:
                self._end()
            elif late is not None:
                postmortem.mark_stall(self.folder, *late)
                self._end()

    def _arm(self) -> None:
        """The stacks get written, without Python's lock, unless this is called again soon."""
        assert self._stacks is not None
        if self._stacks.tell() or os.fstat(self._stacks.fileno()).st_size:
            self._stacks.truncate(0)
            self._stacks.seek(0)
        faulthandler.dump_traceback_later(3 * self._interval, file=self._stacks)

    def end_stalled(self, why: str) -> None:
        """Ends the run as stalled from the main thread: a collective has given up waiting. Does not return.

        Args:
            why: the reason, for the report.
        """
        postmortem.mark_stall(self.folder, PROGRESS.phase, 0.0, why)
        self._end()

    def _end(self) -> None:
        with self._ending:
            before = heartbeats(self._beats)
            postmortem.write_rank(self.folder, self._facts(True), stacks())
            self._gather()
            dumps = postmortem.dumped_ranks(self.folder)
            if min(dumps) == self._rank:
                self._report(before, dumps)
            else:
                self._await_report()
            os._exit(exit_codes.STALLED)

    def _gather(self) -> None:
        """Time for every rank to notice and to write its part; over as soon as all have."""
        until = time.monotonic() + 2 * self._interval + 1.5
        while time.monotonic() < until and len(postmortem.dumped_ranks(self.folder)) < self._world:
            time.sleep(0.1)

    def _report(self, before: Mapping[int, Mapping[str, Any]], dumps: Mapping[int, Mapping[str, Any]]) -> None:
        stall = postmortem.stalled(self.folder)
        assert stall is not None
        text = postmortem.verdict(stall, before, heartbeats(self._beats), dumps, PROGRESS.host)
        for path in self._beats.glob("rank_*.stacks"):  # of ranks that could not answer, but whose timer could
            rank = int(path.stem.removeprefix("rank_"))
            if rank not in dumps and path.stat().st_size:
                shutil.copyfile(path, self.folder / f"rank_{rank}.txt")
        temporary = self.folder / f".{postmortem.REPORT}"
        temporary.write_text(f"the run stands still: {text}\n", encoding="utf-8")
        os.replace(temporary, self.folder / postmortem.REPORT)
        print(f"megatron-rl: the run stands still: {text}", file=sys.stderr)
        print(f"    stacks, samples and memory of every rank that answers: {self.folder}", file=sys.stderr, flush=True)

    def _await_report(self) -> None:
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until and not (self.folder / postmortem.REPORT).exists():
            time.sleep(0.1)
        time.sleep(0.5)  # the rank that reports ends first, and is the one the launcher quotes


def stacks() -> str:
    """The Python stacks of all threads of this process."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
