"""Helper processes of rewards (`rewards.isolation`) for the forks of `warm.py`: forks too, of a process with their imports.

Of each rank whose rewards are puzzles reasoning_gym's imports take two CPU seconds, and math_verify's one of those that
compare answers. They are not forks of a rank: they have a limit of memory, which what a rank has imported would fill.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import BinaryIO, NoReturn

IMPORTED = ("math_verify", "reasoning_gym", "megatron_rl.rewards.maths", "megatron_rl.rewards.puzzle")
_LARGEST = 2**16  # bytes of a request
_PR_SET_PDEATHSIG = 1


def start() -> str:
    """Forks the process that forks helpers, and that ends with this one, before this one grows; returns its address."""
    address = f"\0helpers-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(address)
        door.listen(64)
        parent = os.getpid()
        if os.fork() == 0:
            end_with(parent)
            _serve(door)
    return address


def end_with(parent: int) -> None:
    """The system kills this process when its parent, of this number, ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def use(address: str) -> None:
    """From here on, rewards of this process have such helpers."""
    from megatron_rl.rewards import isolation

    popen = partial(Helper, address)
    isolation.subprocess = SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]


class Helper:
    """What `rewards.isolation` takes for the `subprocess.Popen` of a helper."""

    def __init__(self, address: str, command: Sequence[str], *, env: Mapping[str, str], **_: object) -> None:
        assert command[1:3] == ["-m", "megatron_rl.rewards.isolation"]
        requests, to_helper = os.pipe()
        from_helper, answers = os.pipe()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visit:
            visit.connect(address)
            socket.send_fds(visit, [json.dumps([command[3:], dict(env)]).encode()], [requests, answers])
            _, [self._process], _, _ = socket.recv_fds(visit, 1, 1)
        os.close(requests)
        os.close(answers)
        self.stdin: BinaryIO = os.fdopen(to_helper, "wb")
        self.stdout: BinaryIO = os.fdopen(from_helper, "rb")

    def poll(self) -> int | None:
        return 0 if select.select([self._process], [], [], 0)[0] else None

    def kill(self) -> None:
        signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def wait(self) -> int:
        select.select([self._process], [], [])
        return 0


def _serve(door: socket.socket) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that end
    while True:
        visitor, _ = door.accept()
        with visitor:
            request, files, _, _ = socket.recv_fds(visitor, _LARGEST, 2)
            if not request:  # it was killed
                continue
            for name in IMPORTED:  # where a helper is wanted at all
                importlib.import_module(name)
            gc.freeze()
            helper = os.fork()
            if helper == 0:
                door.close()
                visitor.close()
                _become(*json.loads(request), files)
            socket.send_fds(visitor, [b"."], [process := os.pidfd_open(helper)])
            for file in (*files, process):
                os.close(file)


def _become(arguments: list[str], environment: dict[str, str], files: list[int]) -> NoReturn:
    """As `python -m megatron_rl.rewards.isolation ARGUMENTS`; does not return."""
    from megatron_rl.rewards import isolation

    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        nothing = os.open(os.devnull, os.O_WRONLY)
        for number, file in enumerate((*files, nothing)):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(environment)
        sys.stdin = os.fdopen(0)
        isolation._serve(arguments[0], arguments[1:])
    finally:
        os._exit(0)
