"""What processes have in /dev/shm, and what the tests leave there: a session of tests that leaves a name fails by it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

FOLDER = Path("/dev/shm")
MARK = "MEGATRON_RL_TESTS"  # variable: which session of tests a process belongs to
_LOOK, _LOOKS = 0.5, 4  # seconds between two looks; at a new name before it is taken for another program's


def names() -> set[str]:
    """Of all that this user has there."""
    found = set()
    for path in FOLDER.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_uid == os.geteuid():
                found.add(path.name)
    return found


def held(processes: Iterable[int] | None = None) -> set[str]:
    """Names there that processes have mapped or open; None: those of all processes that this user can look into."""
    numbers = [int(path.name) for path in Path("/proc").glob("[0-9]*")] if processes is None else processes
    paths = set[str]()
    for number in numbers:
        folder = Path(f"/proc/{number}")
        with contextlib.suppress(OSError):
            paths |= {line.partition("/")[2] for line in (folder / "maps").read_text().splitlines() if "/" in line}
        with contextlib.suppress(OSError):
            for file in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):
                    paths.add(os.readlink(file).removeprefix("/"))
    inside = f"{FOLDER}/".removeprefix("/")
    return {path.removeprefix(inside) for path in paths if path.startswith(inside)}


class Record:
    """Names that the processes of these tests have had there, as a look twice a second at new names finds them."""

    def __init__(self) -> None:
        self._known = names()
        self._own, self._looks = set[str](), Counter[str]()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        os.environ[MARK] = str(os.getpid())
        self._thread.start()

    def end(self) -> list[str]:
        """Those that are left."""
        self._ended.set()
        self._thread.join()
        return sorted(self._own & names())

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK):
            new = names() - self._known
            if new:
                self._own |= new & held(_own_processes())
                self._looks.update(new)
                self._known |= self._own | {name for name in new if self._looks[name] == _LOOKS}


def _own_processes() -> list[int]:
    """This process, those that it started and they started, and those that have their environment."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    own, mark = [], f"{MARK}={os.getpid()}".encode()
    for number in parents:
        ancestor = number
        while ancestor not in (0, os.getpid()):
            ancestor = parents.get(ancestor, 0)
        with contextlib.suppress(OSError):
            if ancestor or mark in Path(f"/proc/{number}/environ").read_bytes().split(b"\0"):
                own.append(number)
    return own


# ------------------------------------------------------------------------------------------------------- hooks of pytest
_RECORD, _LEFT = pytest.StashKey[Record](), pytest.StashKey[list[str]]()


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):  # the process that reports
        session.config.stash[_RECORD] = Record()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if _RECORD in session.config.stash:
        left = session.config.stash[_LEFT] = session.config.stash[_RECORD].end()
        if left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left := config.stash.get(_LEFT, []):
        terminalreporter.section("left in shared memory", red=True, bold=True)
        terminalreporter.line(f"made by processes of these tests, still in {FOLDER}: {', '.join(left)}")
