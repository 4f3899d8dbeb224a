"""Graceful stops: the first signal is noted, and obeyed between two phases, by all ranks together."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING

from megatron_rl.runtime import exit_codes

if TYPE_CHECKING:  # torch is not imported yet when the first signal may come
    from megatron_rl.runtime.distributed import ProcessGrid

# Ctrl-C; the end of a job, or preemption; and what batch systems are told to send some time before that.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequested(Exception):
    """Raised on every rank at the same point of the loop. `signum` is the signal that some rank received."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


def stop_code(signum: int) -> int:
    """128 + the signal for a person's Ctrl-C or kill; REQUEUE for a batch system's signals."""
    from_batch = signum == signal.SIGUSR1 or (signum == signal.SIGTERM and "SLURM_STEP_ID" in os.environ)
    return exit_codes.REQUEUE if from_batch else 128 + signum


def hold_back() -> None:
    """Blocks SIGNALS in this process and its children: they stay pending until `let_through`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def let_through() -> None:
    """Unblocks SIGNALS, which a launcher blocks for its ranks. A rank calls it (`StopFlag` does) once it has handlers."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """SIGNALS stay pending while entered. A process that is started inside has them blocked until it calls `let_through`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_at_once() -> None:
    """Lets signals end a command with nothing to save: Ctrl-C ends it without a traceback, SIGUSR1 with REQUEUE.

    Unblocks SIGNALS: a command whose parent had blocked them would inherit that, and never end when told to.
    """
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    signal.signal(signal.SIGUSR1, lambda number, frame: os._exit(exit_codes.REQUEUE))
    let_through()


@contextlib.contextmanager
def raising() -> Iterator[None]:
    """Lets signals raise in a command that cleans up when it ends: Ctrl-C raises KeyboardInterrupt, SIGUSR1 SystemExit with
    REQUEUE."""
    with handling(
        {signal.SIGINT: signal.default_int_handler, signal.SIGUSR1: lambda number, frame: sys.exit(exit_codes.REQUEUE)}
    ):
        yield


@contextlib.contextmanager
def handling(handlers: Mapping[int, Callable[[int, FrameType | None], object]]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopFlag:
    """Installs handlers, and lets through the signals that the launcher has held back.

    A second Ctrl-C acts at once; the others may come several times for one and the same reason (a batch system sends them to
    the process, and its launcher passes them on), so a second one changes nothing.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._end: Callable[[int], None] | None = None
        for number in SIGNALS:
            signal.signal(number, self._note)
        let_through()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = self.signum or signum
        if self._end is not None:
            self._end(self.signum)
        if signum == signal.SIGINT:
            signal.signal(signum, signal.SIG_DFL)

    def end_at_once(self, end: Callable[[int], None]) -> None:
        """Lets signals end work that loses nothing: a signal, also one received earlier, calls `end`, which does not
        return."""
        self._end = end
        if self.signum:
            end(self.signum)

    def ignore(self) -> None:
        """The process is about to end by itself: Python takes its handlers away before that, and a signal would kill."""
        for number in SIGNALS[1:]:
            signal.signal(number, signal.SIG_IGN)

    def check(self, grid: ProcessGrid) -> None:
        """All ranks call this together, at a point where what they hold is worth saving.

        Raises:
            StopRequested: if any rank has been signalled.
        """
        import numpy as np  # later than the first signal may come

        signum = int(grid.gather_rows(np.array([self.signum])).max())
        if signum:
            raise StopRequested(signum)
