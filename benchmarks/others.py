"""What other programs took of this machine's cores while a benchmark measured: beside them its times are upper bounds."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

IDLE = 0.1  # cores; more than this is told loudly
_TICKS = os.sysconf("SC_CLK_TCK")  # a second
_TOLD_BY = "MEGATRON_RL_BENCHMARK"  # variable: the process of the benchmark that tells it, which started this one


def _busy() -> float:
    """Seconds for which the machine's cores have worked, for anyone, the hypervisor's other guests (`steal`) included."""
    user, nice, system, _, _, *interrupts_and_steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + sum(interrupts_and_steal)) / _TICKS


def _own() -> float:
    """CPU seconds of this process, of all that it has waited for, and of what it has started and still runs."""
    parents, seconds = dict[int, int](), dict[int, float]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        number = int(path.parent.name)
        parents[number], seconds[number] = int(fields[1]), sum(map(int, fields[11:15])) / _TICKS
    own = {os.getpid()}
    while grown := {number for number, parent in parents.items() if parent in own} - own:
        own |= grown
    return sum(seconds[number] for number in own)


def watch() -> Callable[[], float]:
    """Begins to count; each call of what it returns gives the cores that others have taken since then, in the mean."""
    begin, busy, own = time.perf_counter(), _busy(), _own()
    return lambda: max(0.0, (_busy() - busy - (_own() - own)) / (time.perf_counter() - begin))


@contextmanager
def told() -> Iterator[None]:
    """Says at its end, on standard error, what others took meanwhile. Processes that the benchmark starts say nothing."""
    if _TOLD_BY in os.environ:
        yield
        return
    os.environ[_TOLD_BY] = str(os.getpid())
    taken = watch()
    try:
        yield
    finally:
        del os.environ[_TOLD_BY]
        cores = taken()
        print(f"others took {cores:.2f} of this machine's {os.cpu_count()} cores while this ran", file=sys.stderr)
        if cores > IDLE:
            print(
                "*** THE MACHINE WAS NOT IDLE: seconds by the clock are upper bounds ***", file=sys.stderr, flush=True
            )
