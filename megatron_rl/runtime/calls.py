"""Work in the background: the process's event loop, and calls in threads with a deadline that holds for the caller."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

_WAITING_AT_ONCE = 64


class CallTimeout(Exception):
    """A call did not end by its deadline."""


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process's requests and calls, in a thread that does not keep the process alive."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="background", daemon=True).start()
    return loop


def processors() -> int:
    """This process's share of the host's processors."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@functools.cache
def call_pool() -> CallPool:
    """The pool of this process: one worker per processor."""
    return CallPool(processors())


@functools.cache
def waiting_pool() -> CallPool:
    """The pool of this process for calls that mostly wait for others; one that hangs takes its place until its deadline."""
    return CallPool(_WAITING_AT_ONCE)


class CallPool:
    """Runs calls in threads, `workers` at a time.

    Python cannot end a thread. One whose call is late is left behind: it holds no worker, and does not keep the process
    from ending.
    """

    def __init__(self, workers: int) -> None:
        self._workers = asyncio.Semaphore(workers)

    def submit[T](self, function: Callable[[], T], seconds: float | None) -> Future[T]:
        """Starts a call in its turn. Cancelling the future drops a call that has not begun.
        `seconds`: the deadline, from when the call begins; None: the function has its own.

        The future raises:
            CallTimeout: at the deadline.
        """
        return asyncio.run_coroutine_threadsafe(self.run(function, seconds), event_loop())

    async def run[T](self, function: Callable[[], T], seconds: float | None) -> T:
        """`submit`, for coroutines in `event_loop()`."""
        async with self._workers:
            ended: Future[T | _Raised] = Future()
            ended.set_running_or_notify_cancel()  # only the thread may complete it
            threading.Thread(target=_run, args=(function, ended), name="call", daemon=True).start()
            done, _ = await asyncio.wait([asyncio.wrap_future(ended)], timeout=seconds)
        if not done:
            raise CallTimeout
        outcome = done.pop().result()
        if isinstance(outcome, _Raised):
            raise outcome.error
        return outcome


@dataclass(frozen=True)
class _Raised:
    error: Exception


def _run[T](function: Callable[[], T], ended: Future[T | _Raised]) -> None:
    try:
        outcome: T | _Raised = function()
    except Exception as error:  # raised again by `CallPool.run`
        outcome = _Raised(error)
    except BaseException as error:  # of `sys.exit()`, say: as it is it would end the event loop
        outcome = _Raised(RuntimeError(f"the call ended by {error!r}"))
    ended.set_result(outcome)
