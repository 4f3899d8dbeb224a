"""A clock for deadlines that a suspended machine, a stopped process and a step of the system clock leave alone."""

from __future__ import annotations

import time
from collections.abc import Callable


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
