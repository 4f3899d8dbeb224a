"""A polite request to stop: the first SIGINT or SIGTERM is noted and obeyed between two phases, by all ranks together."""

from __future__ import annotations

import signal
from types import FrameType

from megatron_rl.runtime.distributed import Grid


class StopRequested(Exception):
    """Raised on every rank at the same point of the loop. `signum` is the signal that some rank received."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


class StopFlag:
    """Installs handlers; a second signal of the same kind acts at once, as it would have without us."""

    def __init__(self) -> None:
        self.signum = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        signal.signal(signum, signal.SIG_DFL)

    def check(self, grid: Grid) -> None:
        """All ranks call this together.

        Raises:
            StopRequested: if any rank has been signalled.
        """
        signum = max(grid.all_gather(self.signum))
        if signum:
            raise StopRequested(signum)
