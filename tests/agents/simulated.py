"""An event loop on a simulated clock: an agent that waits ten seconds costs none, and everybody comes in the order of the
times that are drawn."""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable, Sequence
from typing import Any


class _Selector(selectors.DefaultSelector):
    """Waits for other threads only; `idle` is set while it does."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = threading.Event()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if (events := super().select(0)) or (timeout is not None and timeout <= 0):
            return events
        self.idle.set()
        return super().select(None)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Its time stands still unless another thread calls `advance`."""

    def __init__(self) -> None:
        self.now = 0.0
        self._waiting = _Selector()
        super().__init__(self._waiting)

    def time(self) -> float:
        return self.now

    def settle(self) -> None:
        """Returns when everything is done that can be done by now."""
        seen = threading.Event()

        def see() -> None:
            self._waiting.idle.clear()
            seen.set()

        self.call_soon_threadsafe(see)
        assert seen.wait(20)
        assert self._waiting.idle.wait(20)

    def advance(self, seconds: float | None = None) -> None:
        """Lets time pass; None: until the next one who waits. What is due then is done before `settle` returns."""
        if seconds is None:
            self.settle()
            timers: list[Any] = [timer for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
            seconds = max(0.0, min(timer.when() for timer in timers) - self.now)
        self.now += seconds


def polling(loop: SimulatedLoop, poll: Callable[[bool], Sequence[Any]]) -> Callable[[bool], Sequence[Any]]:
    """Asks as an engine does that has nothing else to do while it waits."""

    def polled(wait: bool) -> Sequence[Any]:
        loop.settle()
        came = poll(False)
        while wait and not came:
            loop.advance()
            loop.settle()
            came = poll(False)
        return came

    return polled
