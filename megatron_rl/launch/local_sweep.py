"""The runs of a sweep on this machine, some at a time: each is a `megatron-rl` process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from megatron_rl.launch.job_plan import LaunchError
from megatron_rl.runtime import exit_codes, stop
from megatron_rl.runtime.process import die_with_parent

_POLL = 0.1  # seconds
_LAST_LINES = 2.0  # seconds that a run's last lines may take; what it left behind could keep its output open
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def with_seeds(lines: Sequence[str], seeds: int | None) -> list[str]:
    """Gives every line each of the seeds 0 to `seeds` - 1; all lines of a seed come first, so that recipes can be compared
    early.

    Raises:
        LaunchError: a line that has a seed already.
    """
    if not seeds:
        return list(lines)
    if seeded := next((line for line in lines if re.search(r"(^|\s)seed=", line)), None):
        raise LaunchError(f"--seeds {seeds}: the line {seeded!r} has a seed already; leave out one of them")
    return [f"{line} seed={seed}" for seed in range(seeds) for line in lines]


@dataclass
class LocalSweep:
    """Runs `megatron-rl` for each of some runs, and keeps the exit codes of those that failed.

    Attributes:
        runs: a name for each, with the arguments of `megatron-rl`.
        at_once: runs at a time. More than one: each line that they print has the run's number in front.
        say: prints a line.
    """

    runs: Mapping[str, Sequence[str]]
    at_once: int
    say: Callable[[str], None] = print
    failed: dict[str, int] = field(default_factory=dict)
    _running: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    _readers: dict[str, threading.Thread] = field(default_factory=dict)
    _stop: int | None = None  # the signal that ends it

    def run(self) -> int:
        """Runs all; one that fails does not keep the others from running.

        Returns: 0; the exit code of the first that failed; after a signal 128 + its number.
        """
        begin, waiting, done = time.monotonic(), iter(self.runs), 0
        with self._signals_passed_on():
            while True:
                while len(self._running) < self.at_once and self._stop is None and (name := next(waiting, None)):
                    self._start(name)
                if not self._running:
                    break
                time.sleep(_POLL)
                for name, process in [*self._running.items()]:
                    if (code := process.poll()) is None:
                        continue
                    del self._running[name]
                    if name in self._readers:
                        self._readers.pop(name).join(_LAST_LINES)
                    done += 1
                    if code:
                        self.failed[name] = code if code > 0 else 128 - code
                    left = (time.monotonic() - begin) / done * (len(self.runs) - done)
                    end = f"FAILED with exit code {self.failed[name]}" if code else "ended"
                    self.say(f"--- {name} {end}; {done} of {len(self.runs)} done, about {left / 60:.0f} min to go")
        if self._stop is not None:
            return 128 + self._stop
        return next(iter(self.failed.values()), exit_codes.OK)

    def _start(self, name: str) -> None:
        self.say(f"--- {name} starts")
        apart = self.at_once > 1
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_rl", *self.runs[name]],
            stdout=subprocess.PIPE if apart else None,
            stderr=subprocess.STDOUT if apart else None,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches it through this process only: once
            preexec_fn=die_with_parent(
                os.getpid()
            ),  # a killed sweep that is started again would find its run folder held
        )
        self._running[name] = process
        if self._stop is not None:  # a signal that came while it was being started
            process.send_signal(self._stop)
        if process.stdout is not None:
            reader = threading.Thread(target=self._pass_on, args=(name[:3], process.stdout), daemon=True)
            reader.start()
            self._readers[name] = reader

    def _pass_on(self, number: str, lines: Iterator[str]) -> None:
        for line in lines:
            self.say(f"[{number}] {line.rstrip()}")

    def _signals_passed_on(self) -> AbstractContextManager[None]:
        def pass_on(number: int, frame: object) -> None:
            self._stop = number
            for process in self._running.values():
                process.send_signal(number)

        heard = [number for number in _STOPPING if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores one
        return stop.handling(dict.fromkeys(heard, pass_on))
