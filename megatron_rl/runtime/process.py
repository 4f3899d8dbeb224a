"""Which process a recorded pid means, perhaps one of another machine; an end with one's parent; what a program inherits."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
# Variables of this process's Python, libraries and rank, by how they begin.
_OURS = ("PYTHON", "VIRTUAL_ENV", "MASTER_", "TORCH", "VLLM", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def started(pid: int) -> int | None:
    """Ticks since boot at which a process was started, which tell it from a later one with the same number.

    None where no such process runs (a zombie does not)."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def session(leader: int) -> dict[int, bytes]:
    """pid -> command, its words separated by zeros, of the processes of a session that have not ended."""
    command_lines = {}
    for folder in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(folder.name))
        if fields is not None and int(fields[3]) == leader:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                command_lines[int(folder.name)] = (folder / "cmdline").read_bytes()
    return command_lines


def _stat(pid: int) -> list[str] | None:
    """/proc/<pid>/stat from the state on; None where no such process runs (a zombie does not)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields


@functools.cache
def space() -> str:
    """This machine's boot and this process's namespace of process numbers: within both, a number means the same process."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return f"unknown {socket.gethostname()} {os.getpid()}"


def send(pid: int, start: int, where: str, number: int) -> bool:
    """Sends a signal to the process that `started` and `space` identify, if it has a handler for it; whether it was sent."""
    if where != space():
        return False
    try:
        handle = os.pidfd_open(pid)
    except OSError:  # it has ended
        return False
    try:
        # The handle keeps the number from being given to another process between this and the signal.
        if started(pid) != start or not _handles(pid, number):
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def _handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, which would otherwise end it."""
    found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)


def die_with_parent(parent: int) -> Callable[[], None]:
    """A child's preparation before it runs its command: the kernel is to kill it when this process dies."""
    prctl = ctypes.CDLL(None).prctl  # looked up here: after fork, as little as possible should happen

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return ask


def variables_for_another_python() -> dict[str, str]:
    """This process's variables, without those meant for its Python, its libraries and its place among ranks: a program of
    another environment would find this one's packages by PYTHONPATH, and take itself for a rank."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
