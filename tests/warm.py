"""Python processes that start with torch, Megatron-Core and vLLM imported, which is half of what a short run takes.

`Warm([...])` is to a test what `subprocess.Popen([sys.executable, ...])` is. One process per session of tests imports, does
nothing else, and forks. A fork runs the main part of a module or a script. What it then starts as ranks (`runtime.spawn`) are
forks of the same untouched process, and its children. All have what a new process has: arguments and environment (in /proc
too), streams, no other open files, default signal handlers, a session, an end with their launcher; and they end as ranks do
(`runtime.leaving`). But they share one hash seed: of new processes are `straight` of tests/e2e, and of the Slurm tests
torchrun's second attempt, NeMo-Run's jobs, and one that is told to end while it imports. `python` is for jobs, whose ranks
Slurm is to start. The process that forks is `warm_forks.py`. Helpers of rewards are forks as well (`warm_helpers.py`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from megatron_rl.runtime import spawn
from megatron_rl.runtime.attempts import rank_environment
from tests.warm_forks import Task, receive, send


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
        send(_forge(), Task(list(arguments), dict(environment), os.getcwd(), own_session=own_session), files)
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
    done = run([str(script), json.dumps([list(command), processes, str(log_dir), dict(environment)])], timeout=1800)
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
            ordered = receive(visitor)
            if ordered is not None:
                task, files = ordered
                send(_forge(), task, [*files, visitor.fileno()])
                for file in files:
                    os.close(file)


@functools.cache
def _forge() -> socket.socket:
    """The end of the process that forks: it ends when this socket closes, with the tests' process."""
    own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    room = "x" * 2**12  # what /proc shows as its command line and environment has to hold those of its forks
    subprocess.Popen(
        [sys.executable, "-m", "tests.warm_forks", str(its.fileno()), room],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.DEVNULL,
        pass_fds=[its.fileno()],
        env={**os.environ, **rank_environment(0), "CUDA_VISIBLE_DEVICES": "", "ROOM": "x" * 2**16},
    )
    its.close()
    return own
