"""Where the time goes: wall-clock seconds per named phase."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from megatron_rl.runtime import device


class Phases:
    """Seconds per phase of one step; `on_start` hears the name of each phase as it begins."""

    def __init__(self, on_start: Callable[[str], None] | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._on_start = on_start
        self._begin = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self._on_start is not None:
            self._on_start(name)
        begin = time.perf_counter()
        yield
        device.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def announce(self, name: str) -> None:
        """Says what is going on without timing it."""
        if self._on_start is not None:
            self._on_start(name)

    def start(self) -> None:
        """Begins a step: what came since the last one is nobody's time."""
        self.seconds, self._begin = {}, time.perf_counter()

    def take(self) -> dict[str, float]:
        """`timing_s/<phase>` for every phase since `start`, and `timing_s/step`."""
        metrics = {f"timing_s/{name}": seconds for name, seconds in self.seconds.items()}
        metrics["timing_s/step"] = time.perf_counter() - self._begin
        return metrics
