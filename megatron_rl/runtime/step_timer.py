"""Seconds and memory peaks per named phase of a step; also tells the heartbeat which phase it is."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from megatron_rl.runtime import device
from megatron_rl.runtime.heartbeat import HEARTBEAT
from megatron_rl.runtime.memory_use import PhaseMemory


class StepTimer:
    """Seconds and peak memory per phase of one step; `on_start` is called with the name of each phase as it begins."""

    def __init__(self, on_start: Callable[[str], None] | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self.memory = PhaseMemory()
        HEARTBEAT.memory_peaks = lambda: self.memory.highest
        self._on_start = on_start
        self._begin = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        with self.untimed(name):
            yield
            device.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    @contextlib.contextmanager
    def untimed(self, name: str, shown: str | None = None) -> Iterator[None]:
        """A phase whose time is not part of the step's: it has a deadline and a peak of memory like any other.

        A phase that ends in an error stays the current one: the post-mortem says where it happened.
        `shown`: what the terminal says; null: the name.
        """
        self.announce(shown or name)
        HEARTBEAT.enter(name)
        with self.memory(name):
            yield
        HEARTBEAT.leave()

    def announce(self, name: str) -> None:
        """Says what is going on without timing it."""
        if self._on_start is not None:
            self._on_start(name)

    def start(self, step: int) -> None:
        """Starts the step timer. Time and peaks between steps, and of stages before, are not attributed to any phase."""
        HEARTBEAT.step = step
        self.memory.start()
        self.seconds, self._begin = {}, time.perf_counter()

    def take(self) -> dict[str, float]:
        """`timing_s/<phase>` for every phase since `start`, and `timing_s/step`."""
        metrics = {f"timing_s/{name}": seconds for name, seconds in self.seconds.items()}
        metrics["timing_s/step"] = time.perf_counter() - self._begin
        return metrics
