"""Ranks with Transformer Engine: forks of one process that has imported it, its stand-ins and Megatron-Core."""

from __future__ import annotations

import functools
import gc
import importlib
import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch.multiprocessing as mp

from tests import imports
from tests.actor.processes import free_port, run_rank


def spawn(function: Callable[..., None], world: int, *arguments: object) -> None:
    """Runs `function(*arguments)` on `world` ranks that find each other by the environment; raises what one raised."""
    requests = _start()
    requests.send((function, world, arguments))
    failure = requests.recv()
    if failure is not None:
        raise AssertionError(failure)


@functools.cache
def _start() -> Connection:
    """Of a session of tests; it ends when this process does."""
    own, its = multiprocessing.Pipe()
    command = [sys.executable, "-m", "tests.te.processes", str(its.fileno())]
    subprocess.Popen(command, cwd=Path(__file__).parents[2], pass_fds=[its.fileno()])
    its.close()
    return own


def main() -> None:
    from tests.te.standin.install import install

    install()
    for name in imports.IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    requests = Connection(int(sys.argv[1]))
    while True:
        try:
            function, world, arguments = requests.recv()
        except EOFError:
            return
        requests.send(_run(function, world, arguments))


def _run(function: Callable[..., None], world: int, arguments: tuple[object, ...]) -> str | None:
    """What went wrong."""
    try:
        mp.start_processes(run_rank, (world, free_port(), function, arguments), nprocs=world, start_method="fork")
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        return str(error)
    return None


if __name__ == "__main__":
    main()
