"""What the fuzzers share: `python -m tests.fuzz.NAME --seconds N [--seed N]` tries case after case until the time is up."""

from __future__ import annotations

import argparse
import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType


class TooSlow(AssertionError):
    """A case that does not end."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Interrupts what takes longer; for code that runs in the main thread and comes back to Python now and then."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"still running after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(try_case: Callable[[int], object], name: str) -> None:
    """Tries cases by their number, from `--seed` on, for `--seconds`; the first that fails ends it, with its number."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.fuzz.{name}")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10**6 * 1000, help="number of the first case")
    args = parser.parse_args()
    end, number = time.monotonic() + args.seconds, args.seed
    while time.monotonic() < end:
        try:
            try_case(number)
        except BaseException:
            print(
                f"\n{name}: case {number}; again with: python -m tests.fuzz.{name} --seed {number} --seconds 1",
                flush=True,
            )
            raise
        number += 1
    print(f"{name}: {number - args.seed} cases from {args.seed} on, none failed", flush=True)
