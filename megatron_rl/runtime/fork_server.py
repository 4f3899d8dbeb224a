"""One process that imports what all ranks of this machine need, forks them, and ends: imports are most of a rank's start.

The launcher starts it as `python -m megatron_rl.runtime.fork_server REPORT GO IMPORTS MODULE ARGUMENTS...`. It writes to
the pipe REPORT either the ranks' process ids, once it has forked, or why it cannot: a fork has none of its parent's
threads, and a CUDA driver that the parent has used does not work in it. Once it has ended, the ranks are the launcher's own
children (which has made itself their "subreaper" meanwhile), so all that it knows of ranks holds: exit codes, signals, an
end with the launcher. They begin when it says so in the pipe GO, and end where that closes first. They share one hash seed.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from megatron_rl.runtime import stop
from megatron_rl.runtime.process import die_with_parent

_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36  # <sys/prctl.h>
_BLAS = "OPENBLAS_NUM_THREADS"  # NumPy's and SciPy's OpenBLAS starts its threads when it is loaded


@dataclass(frozen=True)
class RankWorld:
    """One rank's own part of the world: variables of its environment, and the numbers of its open files."""

    variables: Mapping[str, str]
    stdout: int
    stderr: int


# ------------------------------------------------------------------------------------------------------- in the launcher
class ForkServer:
    """Starts the process. The standard output and error of its imports are the first rank's `stderr`."""

    def __init__(
        self,
        command: Sequence[str],
        imports: str,
        worlds: Sequence[RankWorld],
        environment: Mapping[str, str],
        files: Sequence[int],
    ) -> None:
        """Args:
        command: of every rank, `python -m MODULE ARGUMENTS...`.
        imports: a module whose `import_all` is called before the forks.
        files: open files that the ranks inherit, under the same numbers.
        """
        python, dash_m, *rest = command
        assert dash_m == "-m"
        self._ranks = len(worlds)
        self._report, report = os.pipe()
        go, self._go = os.pipe()
        os.write(self._go, json.dumps([vars(world) for world in worlds]).encode() + b"\n")
        _be_subreaper(True)
        outputs = {number for world in worlds for number in (world.stdout, world.stderr)}
        try:
            self.process = subprocess.Popen(
                [python, "-m", __name__, str(report), str(go), imports, *rest],
                stdin=subprocess.DEVNULL,
                stdout=worlds[0].stderr,
                stderr=worlds[0].stderr,
                env=environment,
                pass_fds=[report, go, *outputs, *files],
                start_new_session=True,
                preexec_fn=die_with_parent(os.getpid()),
            )
        finally:
            os.close(report)
            os.close(go)

    def answer(self) -> list[int] | str | None:
        """Waits for the imports. Process ids of the ranks; or why there are none; None where the process died of itself."""
        with os.fdopen(self._report, closefd=False) as file:
            text = file.read()
        found: list[int] | str | None = json.loads(text) if text.endswith("\n") else None
        return found

    def let_go(self) -> None:
        """Lets the ranks begin; the process has ended."""
        os.write(self._go, b"." * self._ranks)

    def close(self) -> None:
        """Ranks that have not begun end."""
        _be_subreaper(False)
        os.close(self._report)
        os.close(self._go)


class Adopted:
    """A child of this process that it has not started: `pid`, `returncode` and `wait` are those of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._reaping = threading.Lock()

    def wait(self) -> int:
        with self._reaping:
            if self.returncode is None:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _be_subreaper(yes: bool) -> None:
    """Whether orphans among this process's descendants become its children. Linux 3.4 and later know it."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


# -------------------------------------------------------------------------------------------------- in the forking process
def main() -> None:
    stop.end_at_once()  # there is nothing to save
    report, go, launcher = int(sys.argv[1]), int(sys.argv[2]), os.getppid()
    imports, module, *arguments = sys.argv[3:]
    worlds = [RankWorld(**world) for world in json.loads(_line(go))]
    is_given = _BLAS in os.environ
    os.environ.setdefault(_BLAS, "1")
    importlib.import_module(imports).import_all()
    if not is_given:
        del os.environ[_BLAS]
    gc.freeze()  # the ranks' collections neither search nor write to what they share
    why = in_the_way()
    if why is not None:
        os.write(report, json.dumps(why).encode() + b"\n")
        return
    stop.hold_back()  # until a rank has its handlers
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGUSR1, signal.SIG_DFL)):
        signal.signal(number, handler)
    sys.stdout.flush()
    sys.stderr.flush()
    world = _fork(worlds, report)
    outputs = {number for each in worlds for number in (each.stdout, each.stderr)}
    _become(world, outputs, launcher, go)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def in_the_way(tasks: Path = Path("/proc/self/task")) -> str | None:
    """Why forks of this process would not be like new processes; None where they are."""
    names = sorted((task / "comm").read_text().strip() for task in tasks.iterdir())
    if len(names) > 1:
        return f"the imports have left threads, which a fork would lack: {', '.join(names)}"
    children = tasks / str(os.getpid()) / "children"
    if children.exists() and children.read_text().split():  # a kernel may be built without that file
        return "the imports have started processes, which forks would share"
    if not _works_in_a_fork(_start_driver):
        return "CUDA's driver does not start in a fork, as after imports that have used it"
    return None


def _start_driver() -> bool:
    """Whether this process can use CUDA, or there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return bool(driver.cuInit(0) in (0, 100))  # CUDA_SUCCESS, CUDA_ERROR_NO_DEVICE


def _works_in_a_fork(check: Callable[[], bool]) -> bool:
    child = os.fork()
    if child == 0:
        os._exit(0 if check() else 1)
    return os.waitpid(child, 0)[1] == 0


def _fork(worlds: Sequence[RankWorld], report: int) -> RankWorld:
    """Returns in every rank, with its world; the process itself ends here."""
    pids = []
    for world in worlds:
        pid = os.fork()
        if pid == 0:
            os.setsid()  # before anything is sent to the group of the process that forks
            os.close(report)
            return world
        pids.append(pid)
    os.write(report, json.dumps(pids).encode() + b"\n")
    os._exit(0)


def _become(world: RankWorld, outputs: set[int], launcher: int, go: int) -> None:
    """Makes a fork what a new process would be; returns once it may begin."""
    os.dup2(world.stdout, 1)
    os.dup2(world.stderr, 2)
    for number in outputs - {1, 2}:
        os.close(number)
    if not os.read(go, 1):
        os._exit(1)
    os.close(go)
    die_with_parent(launcher)()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"rank {world.variables['RANK']}".encode(), 0, 0, 0)
    os.environ.update(world.variables)
    sys.stdout = _stream(1, sys.stdout)
    sys.stderr = _stream(2, sys.stderr)
    # Of the generators that libraries share, NumPy's is the one that a fork does not seed again by itself.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _stream(number: int, former: TextIO) -> TextIO:
    """A standard stream as Python opens it: what the former one knows of its file, a pipe need not have."""
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    binary = io.FileIO(number, "w", closefd=False)
    return io.TextIOWrapper(
        cast(BinaryIO, binary) if is_unbuffered else io.BufferedWriter(binary),
        former.encoding,
        former.errors,
        line_buffering=is_unbuffered or number == 2 or os.isatty(number),
        write_through=is_unbuffered,
    )


def _line(file: int) -> bytes:
    """Reads up to the end of a line, byte by byte: what follows is the ranks'."""
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(file, 1)
    return line


if __name__ == "__main__":
    main()
