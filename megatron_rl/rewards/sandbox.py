"""Runs untrusted Python in a sandbox and returns its output.

Every run is a process of its own that gives up its rights before the program starts (`sandbox_child`): no network, no other
processes, read access to Python's own library only, write access to a scratch folder only, limits on CPU time, memory, output
and disk, an empty environment. It is killed at its deadline. Where the kernel cannot enforce this, nothing is run.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megatron_rl.rewards.sandbox_child import BAD_SYNTAX

_CHILD = Path(__file__).with_name("sandbox_child.py")
_FAILURES = {BAD_SYNTAX: "syntax", -signal.SIGXCPU: "time", -signal.SIGKILL: "time"}
_TICK = 0.05  # seconds between looks at the scratch folder


class SandboxError(RuntimeError):
    """This machine cannot run programs safely; the message says what is missing."""


@dataclass(frozen=True)
class Limits:
    """Resources that one run may use."""

    cpu_seconds: int = 4
    wall_seconds: float = 10.0
    memory_mib: int = 512  # address space
    output_mib: int = 8  # of what it prints, and of each file in the scratch folder
    threads: int = 64  # at a time, the main one included
    scratch_mib: int = 32  # of all files there; it is looked at 20 times a second


@dataclass(frozen=True)
class ProgramResult:
    """The result of one run.

    `status`: `ok` (exit code 0), `syntax` (it does not compile), `error` (it raised, or hit its memory or output limit),
    `time`, or `disk` (more than `scratch_mib` in the scratch folder).
    """

    status: str
    stdout: str = ""
    value: object = None  # what the called function returned, as JSON has it (tuples are lists)
    error: str = ""  # end of what it wrote to stderr


def run_program(
    code: str,
    stdin: str = "",
    function: str | None = None,
    arguments: list[object] | None = None,
    limits: Limits | None = None,
) -> ProgramResult:
    """Run a program once.

    Args:
        code: Python source; it can import the standard library only.
        function: None runs the source as a script. Otherwise it is imported, with common names of the standard library
            predefined, and this function, or method of its class `Solution`, is called.
        arguments: of the function, as JSON values.

    Raises:
        SandboxError: the machine cannot confine the program; it was not run.
    """
    limits = limits or Limits()
    job = {
        "code": code,
        "function": function,
        "arguments": arguments or [],
        "limits": {
            "cpu_seconds": limits.cpu_seconds,
            "memory_bytes": limits.memory_mib << 20,
            "file_bytes": limits.output_mib << 20,
        },
    }
    with (
        tempfile.TemporaryDirectory(prefix="sandbox-") as scratch,
        _file(json.dumps(job)) as request,
        _file(stdin) as stdin_file,
        _file() as refused,
        _file() as printed,
        _file() as returned,
        _file() as complained,
        _Threads(limits.threads) as threads,
    ):
        channels = request.fileno(), refused.fileno(), returned.fileno(), threads.child_end.fileno()
        process = subprocess.Popen(
            [sys.executable, "-s", "-P", "-S", "-B", str(_CHILD), *map(str, channels)],
            stdin=stdin_file,
            stdout=printed,
            stderr=complained,
            cwd=scratch,
            env={"LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},  # a set of texts has the same order in each run
            pass_fds=channels,
            start_new_session=True,
        )
        try:
            status = _watch(process, scratch, limits, threads)
        finally:
            process.kill()
            process.wait()
        if reason := _content(refused):
            raise SandboxError(f"programs cannot be run safely on this machine: {reason}")
        error = _content(complained)[-2000:]
        if status != "ok":
            return ProgramResult(status, error=error)
        if process.returncode:
            return ProgramResult(_FAILURES.get(process.returncode, "error"), error=error)
        value = None
        if function is not None:
            try:
                value = json.loads(_content(returned))
            except (ValueError, RecursionError):  # the program ended before the function returned
                return ProgramResult("error", error="the function did not return a value that JSON can hold")
        return ProgramResult("ok", stdout=_content(printed), value=value, error=error)


@contextmanager
def _file(text: str = "") -> Iterator[BinaryIO]:
    """An unnamed file with this text, to be read from its start."""
    with tempfile.TemporaryFile() as file:
        file.write(text.encode("utf-8", "surrogatepass"))
        file.seek(0)
        yield file


def _content(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def _watch(process: subprocess.Popen[bytes], scratch: str, limits: Limits, threads: _Threads) -> str:
    """`ok` once the process has ended by itself; `time` or `disk` once it has reached that limit."""
    deadline = time.monotonic() + limits.wall_seconds
    descriptor = os.pidfd_open(process.pid)
    threads.child_end.close()
    looked = time.monotonic()
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            selector.register(threads.parent_end, selectors.EVENT_READ)
            while True:
                left = deadline - time.monotonic()
                ready = {key.fd for key, _ in selector.select(max(0.0, min(_TICK, left)))}
                if descriptor in ready:
                    return "ok"
                if threads.parent_end.fileno() in ready:  # once
                    selector.unregister(threads.parent_end)
                    if threads.receive():
                        selector.register(threads.listener, selectors.EVENT_READ)
                if threads.listener in ready and not threads.answer(process.pid):
                    selector.unregister(threads.listener)
                if left <= 0:
                    return "time"
                if time.monotonic() - looked >= _TICK:
                    looked = time.monotonic()
                    if _bytes_in(scratch) > limits.scratch_mib << 20:
                        return "disk"
    finally:
        os.close(descriptor)


class _Threads:
    """Counts a program's threads. The kernel stops it at every `clone` until this side has answered (seccomp_unotify(2)).

    Args:
        limit: threads that may be alive at a time.
    """

    _RECEIVE, _SEND = 0xC0502100, 0xC0182101  # ioctl: SECCOMP_IOCTL_NOTIF_RECV, SECCOMP_IOCTL_NOTIF_SEND
    _NOTIFICATION, _RESPONSE = 80, struct.Struct("<QqiI")  # bytes of the first; id, value, error, flags
    _CONTINUE = 1  # a flag: the system call goes on

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.listener = -1
        self.parent_end, self.child_end = socket.socketpair()

    def __enter__(self) -> _Threads:
        return self

    def __exit__(self, *_: object) -> None:
        self.parent_end.close()
        self.child_end.close()
        if self.listener >= 0:
            os.close(self.listener)

    def receive(self) -> bool:
        """Takes the descriptor that the child sends before it runs the program; False where the child has ended."""
        _, descriptors, _, _ = socket.recv_fds(self.parent_end, 1, 1)
        self.listener = descriptors[0] if descriptors else -1
        return bool(descriptors)

    def answer(self, pid: int) -> bool:
        """Allows one more thread, or refuses it (EAGAIN); False once the program has ended."""
        notification = bytearray(self._NOTIFICATION)
        try:
            fcntl.ioctl(self.listener, self._RECEIVE, notification)
            (number,) = struct.unpack_from("<Q", notification)
            few = len(os.listdir(f"/proc/{pid}/task")) < self._limit
            error, flags = (0, self._CONTINUE) if few else (-errno.EAGAIN, 0)
            fcntl.ioctl(self.listener, self._SEND, bytearray(self._RESPONSE.pack(number, 0, error, flags)))
        except (FileNotFoundError, ProcessLookupError):  # it ended, or the thread that asked was killed
            return os.path.exists(f"/proc/{pid}/task")
        return True


def _bytes_in(folder: str) -> int:
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                total += 4096 + entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:  # it was removed
                continue
    return total
