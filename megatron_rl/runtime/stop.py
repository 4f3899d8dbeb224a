"""A polite request to stop: the first signal is noted and obeyed between two phases, by all ranks together."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch is not imported yet when the first signal may come
    from megatron_rl.runtime.distributed import Grid

# Ctrl-C; the end of a job, or preemption; and what batch systems are told to send some time before that.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequested(Exception):
    """Raised on every rank at the same point of the loop. `signum` is the signal that some rank received."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


class StopFlag:
    """Installs handlers. A second Ctrl-C acts at once; the others may come several times for one and the same reason (a
    batch system sends them to the process, and its launcher passes them on), so a second one changes nothing."""

    def __init__(self) -> None:
        self.signum = 0
        self._end: Callable[[int], None] | None = None
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = self.signum or signum
        if self._end is not None:
            self._end(self.signum)
        if signum == signal.SIGINT:
            signal.signal(signum, signal.SIG_DFL)

    def end_at_once(self, end: Callable[[int], None]) -> None:
        """For what loses nothing by it: a signal, also one that has come already, calls `end`, which does not return."""
        self._end = end
        if self.signum:
            end(self.signum)

    def ignore(self) -> None:
        """The process is about to end by itself: Python takes its handlers away before that, and a signal would kill."""
        for number in SIGNALS[1:]:
            signal.signal(number, signal.SIG_IGN)

    def check(self, grid: Grid) -> None:
        """All ranks call this together, at a point where what they hold is worth saving.

        Raises:
            StopRequested: if any rank has been signalled.
        """
        signum = max(grid.all_gather(self.signum))
        if signum:
            raise StopRequested(signum)
