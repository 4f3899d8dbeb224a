"""Calls in threads, so many at a time, each with a deadline that holds for the caller."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from megatron_rl.rewards.endpoint import event_loop


@dataclass(frozen=True)
class Outcome:
    """What became of one call: a value, an error, or `late`."""

    value: Any = None
    error: Exception | None = None
    late: bool = False


@dataclass(frozen=True)
class Call:
    function: Callable[[], Any]
    seconds: float | None  # its deadline, from when it begins; None: it has limits of its own


class CallPool:
    """Runs groups of calls in threads, `workers` groups at a time.

    Python cannot end a thread. One whose call is late is left behind: it keeps neither the next calls from their turn
    nor the process from ending.
    """

    def __init__(self, workers: int) -> None:
        self._slots = asyncio.Semaphore(workers)

    def submit(self, calls: Mapping[str, Call]) -> Future[dict[str, Outcome]]:
        """Starts the calls of a group, one after the other. Cancelling drops those that have not begun."""
        return asyncio.run_coroutine_threadsafe(self._one_after_other(dict(calls)), event_loop())

    async def _one_after_other(self, calls: dict[str, Call]) -> dict[str, Outcome]:
        async with self._slots:
            return {name: await _outcome(call) for name, call in calls.items()}


async def _outcome(call: Call) -> Outcome:
    future: Future[Outcome] = Future()
    future.set_running_or_notify_cancel()  # so that nobody cancels what its thread is to fill in

    def run() -> None:
        try:
            future.set_result(Outcome(call.function()))
        except Exception as error:  # raised where the outcome is looked at
            future.set_result(Outcome(error=error))

    threading.Thread(target=run, name="reward", daemon=True).start()
    done, _ = await asyncio.wait([asyncio.wrap_future(future)], timeout=call.seconds)
    return done.pop().result() if done else Outcome(late=True)
