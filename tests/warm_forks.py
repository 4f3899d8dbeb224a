"""The process that imports torch, Megatron-Core and vLLM once, and its forks: what `warm.py` asks of it, and what they do."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

from megatron_rl.runtime import leaving, spawn
from tests import warm_helpers
from tests.warm_helpers import end_with

IMPORTED = (
    "megatron.core.dist_checkpointing",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron_rl.trainer.evaluate",
    "megatron_rl.trainer.loop",
    "megatron_rl.trainer.run",
    "megatron_rl.trainer.sft",
    "reasoning_gym",
    "transformers",
    "vllm.entrypoints.llm",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.worker.cpu_worker",
)
RANKS = 4  # as many as any test starts
_LARGEST = 2**17  # bytes of a request: mostly the environment


@dataclass
class Task:
    """What a fork is to become."""

    arguments: list[str]  # after `python`
    environment: dict[str, str]
    folder: str
    blocked: list[int] | None = None  # signals; None: as they are
    numbers: list[int] | None = None  # of open files besides standard output and error
    own_session: bool = False  # and no ranks to start


def send(channel: socket.socket, task: Task, files: Sequence[int]) -> None:
    socket.send_fds(channel, [json.dumps(vars(task)).encode()], files)


def receive(channel: socket.socket) -> tuple[Task, list[int]] | None:
    """None at the end."""
    data, files, _, _ = socket.recv_fds(channel, _LARGEST, 16)
    return (Task(**json.loads(data)), files) if data else None


def main() -> None:
    helpers = warm_helpers.start()
    import_all()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        ordered = _serve(requests)
    if ordered is None:
        return
    sys.stdout.flush()
    task, files = ordered
    blanks = list[tuple[int, socket.socket]]()
    launcher = None if task.own_session else _blank_rank(blanks)
    if launcher is None:
        _become(task, files, [channel.fileno() for _, channel in blanks])
        if blanks:
            spawn.subprocess = SimpleNamespace(Popen=partial(Rank, blanks), DEVNULL=subprocess.DEVNULL)
            # One rank at a time, each a fork that is there already: the process that forks several would import all anew.
            spawn._Group._fork = lambda self, imports, worlds, tee: False  # type: ignore[method-assign]
    else:
        blanks.clear()
        received = receive(launcher)
        if received is None:
            os._exit(0)  # what was imported is not taken apart: that takes longer than all else that this process does
        task, files = received
        answer = _above(1000, launcher.detach())  # none of the numbers that the task's files get
        _become(task, files, [answer])
        os.close(answer)
    warm_helpers.use(helpers)
    try:
        _run(task.arguments)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise  # it is a message
        leaving.leave(end.code or 0)
    leaving.leave(0)


def import_all() -> None:
    from megatron_rl.config import validate
    from megatron_rl.rollout import environment
    from megatron_rl.seams import torch_compile

    environment.prepare()
    torch_compile.leave_out()
    validate.prepare()
    gc.disable()
    with torch_compile.left_out_of_vllm():
        for name in IMPORTED:
            importlib.import_module(name)
        _register_kernels()
        _send_through_gloo()
    gc.enable()
    gc.freeze()  # vLLM collects garbage several times as it starts; what was imported is none


def _register_kernels() -> None:
    """What each engine on a CPU begins with: a search of all that was imported, 0.2 CPU seconds. Once, for all forks."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.triton_utils import dispatcher

    CpuPlatform.register_triton_kernel_overrides()
    dispatcher.register_kernels = lambda overrides: None


def _send_through_gloo() -> None:
    """As on CPUs without AVX-512: ranks of vLLM's collectives spin while they wait, on cores that their peers need.

    A quarter of what an engine of two ranks takes. New processes have vLLM's own.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    assert hasattr(CpuCommunicator, "_all_group_ranks_share_shm_group_name")
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def _serve(requests: socket.socket) -> tuple[Task, list[int]] | None:
    """Returns in every fork that a request asks for, with its task; in the process itself at the end."""
    while (ordered := receive(requests)) is not None:
        task, (*files, status) = ordered
        if os.fork() == 0:  # its child becomes what was asked for, and it says how that ends
            if task.blocked is not None:
                signal.pthread_sigmask(signal.SIG_SETMASK, task.blocked)
            child = os.fork()
            if child == 0:
                return task, files
            _watch(child, status)
            os._exit(0)
        for file in (*files, status):
            os.close(file)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    return None


def _watch(child: int, status: int) -> None:
    """Writes the child's number and how it ends. Kills it where nobody is left to read that."""
    with contextlib.suppress(BrokenPipeError):
        os.write(status, f"{child}\n".encode())
        ends = select.poll()
        ends.register(status, 0)  # whatever is asked for, it is told that the other end was closed
        ends.register(os.pidfd_open(child), select.POLLIN)
        if status not in dict(ends.poll()):
            os.write(status, f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n".encode())
            return
    for kill in (os.killpg, os.kill):  # with what it has started, where it has a session
        with contextlib.suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)


def _blank_rank(blanks: list[tuple[int, socket.socket]]) -> socket.socket | None:
    """Fills the list with forks that wait for a task. In such a fork: where the task will come from."""
    launcher = os.getpid()
    for _ in range(RANKS):
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            end_with(launcher)
            return its
        its.close()
        blanks.append((pid, own))
    return None


class Rank:
    """What `runtime.spawn` takes for the `subprocess.Popen` of a rank."""

    def __init__(self, blanks: list[tuple[int, socket.socket]], command: list[str], **given: Any) -> None:
        self.pid, channel = blanks.pop(0)
        self.returncode: int | None = None
        self._reaping = threading.Lock()
        stdout, stderr = (
            file if isinstance(file, int) else file.fileno() for file in (given["stdout"], given["stderr"])
        )
        blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
        numbers = list(given["pass_fds"])
        task = Task(command[1:], given["env"], os.getcwd(), blocked, numbers, own_session=True)
        with channel:
            send(channel, task, [stdout, stderr, *numbers])
            channel.recv(1)  # returns once it has its streams, its session and its environment

    def wait(self) -> int:
        with self._reaping:
            if self.returncode is None:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


# ------------------------------------------------------------------------------------------------------------- in a fork
def _become(task: Task, files: list[int], kept: Sequence[int]) -> None:
    """Streams, files, session, environment and names of a new process with this task."""
    wanted = [1, 2, *(task.numbers or [])]
    null = os.open(os.devnull, os.O_RDONLY)
    for file in map(int, os.listdir("/proc/self/fd")):
        if file > 2 and file not in (*files, *kept, null):
            with contextlib.suppress(OSError):  # the folder itself was open while it was listed
                os.close(file)
    high = [_above(1000, file) for file in (null, *files)]
    for file, number in zip(high, (0, *wanted), strict=True):
        os.dup2(file, number)
        os.close(file)
    if task.own_session:
        os.setsid()
    if task.blocked is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, task.blocked)
    os.chdir(task.folder)
    os.environ.clear()
    os.environ.update(task.environment)
    tempfile.tempdir = None  # it may be another now
    unbuffered = bool(task.environment.get("PYTHONUNBUFFERED"))
    sys.stdout, sys.stderr = _stream(1, "strict", unbuffered), _stream(2, "backslashreplace", True)
    _show(["python", *task.arguments], task.environment)


def _stream(file: int, errors: str, unbuffered: bool) -> TextIO:
    binary = io.FileIO(file, "w", closefd=False)
    buffer = binary if unbuffered else io.BufferedWriter(binary)
    return io.TextIOWrapper(buffer, "utf-8", errors, line_buffering=unbuffered, write_through=unbuffered)


def _above(number: int, file: int) -> int:
    moved = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, number)
    os.close(file)
    return moved


def _show(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Puts them where /proc/<pid>/cmdline and environ are read: the memory in which the system gave this process its own."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end, begin_environment, end_environment = map(int, fields[45:49])
    for start, size, words in (
        (begin, end - begin, arguments),
        (begin_environment, end_environment - begin_environment, [f"{k}={v}" for k, v in environment.items()]),
    ):
        text = "\0".join([*words, ""]).encode()
        assert len(text) < size, "no room"
        ctypes.memmove(start, text.ljust(size, b"\0"), size)


def _run(arguments: list[str]) -> None:
    """As `python ARGUMENTS`: a module after -m, or a script."""
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).parent)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
