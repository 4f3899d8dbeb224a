"""Ends a run that hangs, and says where.

Three threads per rank. One compares the phase this rank is in with its deadline, and touches no file while all is well. One
writes the heartbeat and looks whether another rank has reported a stall. One waits for the disk, so that a slow one delays
neither. The first rank past its deadline records that in the post-mortem folder; the others read it at their next beat
and add their own stacks; the lowest rank that answers compares all of them and names the rank that is behind. Then all end
with the exit code STALLED. A rank that cannot answer (stopped, or on a dead node) is ended by its launcher.

A rank takes its own stacks with the GIL held. A rank whose C code keeps the GIL cannot; a rank or launcher that ends
the run on the same machine sends it `postmortem.STACKS_SIGNAL`. Nothing reads the frames of a running thread before that.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from megatron_rl.runtime import disk, exit_codes, postmortem
from megatron_rl.runtime.heartbeat import HEARTBEAT, Beat, Deadlines, Dump, RankFacts, beat_interval, heartbeats

_PATIENCE = 10.0  # seconds to wait for the report of the rank that writes it
_LAST = 60.0  # seconds, and four beats, after which a rank ends without a report: the disk may be what hangs


class Watchdog:
    """Watches this process from threads of its own, from `start` to `stop`.

    Args:
        attempt: this attempt's log folder, the same on all ranks.
        rank, world: this process's place.
        deadlines: seconds per phase; None: heartbeats only.
        facts: what else a heartbeat and a post-mortem should have (collectives, memory); called in a thread.
    """

    def __init__(
        self,
        attempt: Path,
        rank: int,
        world: int,
        deadlines: Deadlines | None,
        facts: Callable[[bool], RankFacts] = lambda full: {},
    ) -> None:
        self.attempt, self.folder = attempt, postmortem.folder_of(attempt)
        self._beats = postmortem.heartbeat_folder(attempt)
        self._deadlines, self._facts = deadlines, facts
        self._interval = beat_interval(world)
        self._rank, self._world = rank, world
        self._done = threading.Event()
        self._ending = threading.Lock()  # both threads and the main one may find the stall
        self._threads = [
            threading.Thread(target=self._watch, name="watchdog", daemon=True),
            threading.Thread(target=self._beat, name="heartbeat", daemon=True),
            threading.Thread(target=self._sync, name="heartbeat to disk", daemon=True),
        ]
        self._stacks: IO[str] | None = None

    def start(self) -> None:
        HEARTBEAT.attach(self._beats, self._rank, self._world, self._deadlines)
        self._stacks = postmortem.stacks_file(self._beats, self._rank).open("w", encoding="utf-8")
        faulthandler.register(postmortem.STACKS_SIGNAL, file=self._stacks, all_threads=True)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """No deadline after this; the last heartbeat stays."""
        self._done.set()
        for thread in self._threads:
            if thread.is_alive() and threading.current_thread() is not thread:
                thread.join(2 * self._interval)
        HEARTBEAT.detach()

    def end_stalled(self, why: str) -> None:
        """Ends the run as stalled from the main thread: a collective has given up waiting. Does not return.
        `why`: the reason, for the report.
        """
        self._end(HEARTBEAT.phase, 0.0, why)

    # ----------------------------------------------------------------------------------------------------------- threads
    def _watch(self) -> None:
        """Deadlines. No file is read or written here before one has passed."""
        while not self._done.wait(self._interval):
            HEARTBEAT.clock.tick()
            late = HEARTBEAT.overdue()
            if late is not None:
                self._end(*late)

    def _beat(self) -> None:
        """Heartbeats, and other ranks' stalls."""
        while not self._done.wait(self._interval):
            HEARTBEAT.facts = self._facts(False)
            HEARTBEAT.beat()
            if self._deadlines is not None and postmortem.stalled(self.folder) is not None:
                self._end()

    def _sync(self) -> None:
        while not self._done.wait(self._interval):
            HEARTBEAT.sync()

    # ------------------------------------------------------------------------------------------------------------ ending
    def _end(self, phase: str | None = None, limit: float = 0.0, why: str = "") -> None:
        """Post-mortem, report, exit. Does not return.

        Args:
            phase, limit, why: the stall that this rank has found; None: another rank has.
        """
        with self._ending:
            last = threading.Timer(_LAST + 4 * self._interval, os._exit, (exit_codes.STALLED,))
            last.daemon = True
            last.start()
            try:
                if phase is not None:
                    postmortem.mark_stall(self.folder, phase, limit, why)
                self._tell()
            except OSError as error:
                print(
                    f"megatron-rl: the run hung; no post-mortem could be written: {error}", file=sys.stderr, flush=True
                )
            finally:
                os._exit(exit_codes.STALLED)

    def _tell(self) -> None:
        before = heartbeats(self._beats)
        postmortem.write_rank(self.folder, self._facts(True), stacks())
        self._gather()
        dumps, after = postmortem.dumped_ranks(self.folder), heartbeats(self._beats)
        if self._rank == min(rank for rank, facts in dumps.items() if facts["host"] == HEARTBEAT.host):
            silent = postmortem.silent_ranks(before, after, dumps)
            with contextlib.suppress(OSError):
                postmortem.take_stacks(self.folder, self._beats, [after[rank] for rank in silent])
        if self._rank == min(dumps):
            self._report(before, after, dumps)
        else:
            self._await_report()

    def _gather(self) -> None:
        """Time for every rank to notice and to write its part; over as soon as all have."""
        until = time.monotonic() + 2 * self._interval + 1.5
        while time.monotonic() < until and len(postmortem.dumped_ranks(self.folder)) < self._world:
            time.sleep(0.1)

    def _report(self, before: Mapping[int, Beat], after: Mapping[int, Beat], dumps: Mapping[int, Dump]) -> None:
        stall = postmortem.stalled(self.folder)
        assert stall is not None
        text = postmortem.verdict(stall, before, after, dumps, HEARTBEAT.host)
        disk.replace(self.folder / postmortem.REPORT, f"the run hung: {text}\n")
        print(f"megatron-rl: the run hung: {text}", file=sys.stderr)
        print(f"    stacks, samples and memory of every rank that answers: {self.folder}", file=sys.stderr, flush=True)

    def _await_report(self) -> None:
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until and not (self.folder / postmortem.REPORT).exists():
            time.sleep(0.1)
        time.sleep(0.5)  # the rank that reports ends first, and is the one the launcher quotes


def stacks() -> str:
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
