"""Python processes that start with torch, Megatron-Core and vLLM imported, which is half of what a short run takes.

`Warm([...])` is to a test what `subprocess.Popen([sys.executable, ...])` is. One process per session of tests imports, does
nothing else, and forks. A fork runs the main part of a module or a script. What it then starts as ranks (`runtime.spawn`) are
forks of the same untouched process, and its children. All have what a new process has: arguments and environment (in /proc
too), streams, no other open files, default signal handlers, a session, an end with their launcher; and they end as ranks do
(`runtime.leaving`). But they share one hash seed: of new processes are `straight` of tests/e2e, and of the Slurm tests
torchrun's second attempt, NeMo-Run's jobs, and one that is told to end while it imports. `python` is for jobs, whose ranks
Slurm is to start. Helpers of rewards are forks as well (`warm_helpers.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import io
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, TextIO

from megatron_rl.runtime import leaving, spawn
from megatron_rl.runtime.attempts import rank_environment
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


# ---------------------------------------------------------------------------------------------------------- in a test
class Warm:
    """A running process. `pid`, `returncode`, `poll` and `wait` are those of `subprocess.Popen`."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        stdout: IO[bytes],
        stderr: IO[bytes],
        own_session: bool = False,
    ) -> None:
        self._status, status = os.pipe()
        files = [stdout.fileno(), stderr.fileno(), status]
        _send(_forge(), Task(list(arguments), dict(environment), os.getcwd(), own_session=own_session), files)
        os.close(status)
        self._lines = os.fdopen(self._status, buffering=1)
        self.pid = int(self._lines.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._lines], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a fork", timeout or 0)
            self.returncode = int(self._lines.readline())
            self._lines.close()
        return self.returncode


def run(
    arguments: Sequence[str], environment: Mapping[str, str] = os.environ, timeout: float = 400
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of `python ARGUMENTS`."""
    with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as err:
        process = Warm(arguments, environment, out, err)
        try:
            code = process.wait(timeout)
        finally:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(list(arguments), code, out.read().decode(), err.read().decode())


def run_ranks(
    command: Sequence[str], processes: int, log_dir: Path, environment: Mapping[str, str]
) -> spawn.RanksOutcome:
    """`runtime.spawn.run_ranks`, called in a process of its own, whose ranks are forks."""
    script = Path(__file__).with_name("launcher.py")
    done = run([str(script), json.dumps([list(command), processes, str(log_dir), dict(environment)])], timeout=900)
    return spawn.RanksOutcome(done.returncode, done.stderr)


@contextlib.contextmanager
def python(folder: Path) -> Iterator[Path]:
    """Makes an environment like this one, in a new folder, for processes that tests do not start themselves.

    Its python is this one. But a rank, a conversion or a check of a recipe is a fork, and the process started here passes
    signals on to it, and ends with its exit code (`stand_in.py`).
    """
    (folder / "bin").mkdir(parents=True)
    (folder / "lib").symlink_to(Path(sys.prefix) / "lib")
    (folder / "pyvenv.cfg").write_text((Path(sys.prefix) / "pyvenv.cfg").read_text())
    stand_in = [sys.executable, "-I", "-S", Path(__file__).with_name("stand_in.py"), folder / "door"]
    (folder / "bin" / "python").write_text(
        "#!/usr/bin/env bash\n"
        'case "$*" in "-m megatron_rl.trainer.rank.main "* | "-m megatron_rl convert "* | "-m megatron_rl "*" --check")\n'
        f'  exec {shlex.join(map(str, stand_in))} "$@" ;;\nesac\nexec -a "$0" {sys.executable} "$@"\n'
    )
    (folder / "bin" / "python").chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(str(folder / "door"))
        door.listen()
        threading.Thread(target=_hand_on, args=(door,), daemon=True).start()
        yield folder
        door.shutdown(socket.SHUT_RDWR)


def _hand_on(door: socket.socket) -> None:
    """Passes each stand-in's request on to the forking process, until the socket closes."""
    while True:
        try:
            visitor, _ = door.accept()
        except OSError:
            return
        with visitor:
            ordered = _receive(visitor)
            if ordered is not None:
                task, files = ordered
                _send(_forge(), task, [*files, visitor.fileno()])
                for file in files:
                    os.close(file)


@functools.cache
def _forge() -> socket.socket:
    """The end of the process that forks: it ends when this socket closes, with the tests' process."""
    own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    room = "x" * 2**12  # what /proc shows as its command line and environment has to hold those of its forks
    subprocess.Popen(
        [sys.executable, "-m", "tests.warm", str(its.fileno()), room],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.DEVNULL,
        pass_fds=[its.fileno()],
        env={**os.environ, **rank_environment(0), "CUDA_VISIBLE_DEVICES": "", "ROOM": "x" * 2**16},
    )
    its.close()
    return own


# ------------------------------------------------------------------------------------------------- in the process that forks
@dataclass
class Task:
    """What a fork is to become."""

    arguments: list[str]  # after `python`
    environment: dict[str, str]
    folder: str
    blocked: list[int] | None = None  # signals; None: as they are
    numbers: list[int] | None = None  # of open files besides standard output and error
    own_session: bool = False  # and no ranks to start


def _send(channel: socket.socket, task: Task, files: Sequence[int]) -> None:
    socket.send_fds(channel, [json.dumps(vars(task)).encode()], files)


def _receive(channel: socket.socket) -> tuple[Task, list[int]] | None:
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
        received = _receive(launcher)
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
    while (ordered := _receive(requests)) is not None:
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
            _send(channel, task, [stdout, stderr, *numbers])
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
