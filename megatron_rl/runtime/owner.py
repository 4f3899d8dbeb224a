"""A lock on the run folder with a heartbeat: one run writes there at a time.

The owner is the command that starts rank 0 (or, under a plain torchrun, becomes it): it takes the folder before it writes
anything there, and holds it until its ranks have ended. Rank 0 gets to know the owner through the environment; it keeps the
file fresh as well, and ends the run when another command has taken the folder.

A command that finds the file decides by evidence. An owner of the same host and process-id space lives exactly as long as its
process does. Of any other owner (a requeued job usually comes to another host) only the heartbeat can be seen: one
younger than 60 s means alive; otherwise the new run watches for up to 60 s before it takes over.

No lock of the kernel's (`fcntl`, `filelock`): whether one holds between hosts depends on how each has mounted the disk,
and a lock does not say who has it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from megatron_rl.runtime import process, stop

FILE = "owner.json"
VARIABLE = "MEGATRON_RL_OWNER"  # in a rank's environment: the owner of its run folder, as JSON
BEAT_SECONDS = 10.0
STALE_SECONDS = 60.0


class OwnedError(RuntimeError):
    """Another run writes into this folder; the message says which."""


@dataclass(frozen=True)
class Owner:
    """The command that holds a folder."""

    host: str
    pid: int
    started: int  # ticks since boot at which the process was started: a later one may have the same number
    space: str  # the host's boot and process-id namespace, in which `pid` means something
    since: str  # when it took the folder, UTC

    @staticmethod
    def me() -> Owner:
        pid = os.getpid()
        since = datetime.now(UTC).isoformat(timespec="seconds")
        return Owner(socket.gethostname(), pid, process.started(pid) or 0, process.space(), since)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    def is_gone(self) -> bool | None:
        """True or False where this machine can tell, otherwise None."""
        return process.started(self.pid) != self.started if self.space == process.space() else None


class Ownership:
    """Holds a run folder from `take` to `release`.

    Args:
        folder: the run folder; made if it is not there.
        holder: who holds it already, where this process writes there on its behalf; None: this process takes it.
        beat_seconds, stale_seconds: how often the owner shows that it lives, and after which silence it counts as dead.
    """

    def __init__(
        self,
        folder: Path,
        holder: Owner | None = None,
        beat_seconds: float = BEAT_SECONDS,
        stale_seconds: float = STALE_SECONDS,
    ) -> None:
        self.path = folder / FILE
        self._beat_seconds, self._stale_seconds = beat_seconds, stale_seconds
        self._holder, self._me = holder, holder or Owner.me()
        self._end = threading.Event()
        self._heart: threading.Thread | None = None
        self._folder: tuple[int, os.stat_result] | None = (
            None  # the one that was taken: a handle on it, device and inode
        )
        self.lost: Owner | None = None  # who took the folder although this run lives: it was halted for too long

    def take(self) -> Owner | None:
        """Makes this process the owner. Returns the dead owner that it replaced, if any.

        Raises:
            OwnedError: another run is alive in this folder, or the given holder has lost it.
        """
        former: Owner | None = None
        if self._holder is not None:
            self.check()
            if not self.path.exists():  # its holder wrote it
                raise OwnedError(gone(self.path.parent))
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            while not self._claim():
                former = self._wait_for_its_end()
                self._remove(former)
        # While the handle is open, no new folder gets the inode of this one.
        handle = os.open(self.path.parent, os.O_PATH | os.O_DIRECTORY)
        self._folder = handle, os.fstat(handle)
        self._heart = threading.Thread(target=self._beat, name="run folder's heartbeat", daemon=True)
        with stop.held_back():  # signals are for the main thread: a new one blocks what the one that starts it does
            self._heart.start()
        return former

    def _wait_for_its_end(self) -> Owner | None:
        """The owner in the file, once it is known to be dead; None where the file is gone or unreadable.

        Raises:
            OwnedError: it is alive; or the path is a folder.
        """
        if self.path.is_dir():
            raise OwnedError(f"{self.path} is a folder, and should be the file that names the run in it: remove it")
        previous = read(self.path.parent)
        gone = previous.is_gone() if previous is not None else None
        if gone is False:
            raise OwnedError(_refusal(self.path, previous))
        if gone is None:
            self._wait_for_silence(previous)
        return previous

    def release(self) -> None:
        """Releases the folder, unless it is held on behalf of another process, which does so itself."""
        if self._heart is None:
            return
        self._end.set()
        self._heart.join()
        self._heart = None
        if self._me.pid == os.getpid() and read(self.path.parent) == self._me:
            self.path.unlink(missing_ok=True)
        if self._folder is not None:
            os.close(self._folder[0])
            self._folder = None

    def is_gone(self) -> bool:
        """Whether the folder that was taken is not at its path any more, also where another one is there now."""
        try:
            there = self.path.parent.stat()
        except FileNotFoundError:
            return True
        except OSError:  # an unavailable disk is reported by what writes to it
            return False
        return self._folder is not None and not os.path.samestat(there, self._folder[1])

    def check(self) -> None:
        """Raises:
        OwnedError: another run has taken the folder meanwhile, or it is gone.
        """
        if self.is_gone():
            raise OwnedError(gone(self.path.parent))
        found = self.lost or read(self.path.parent)
        if found is not None and found != self._me:
            raise OwnedError(f"{self.path.parent} was taken over by {found}, while this run was halted; this one ends")

    def variables(self) -> dict[str, str]:
        """Variables for the environment of a rank that is to write on behalf of this process."""
        return {VARIABLE: json.dumps(asdict(self._me))}

    def _claim(self) -> bool:
        """Creates the file unless it exists: atomically, also on NFS."""
        temporary = self.path.with_name(f".owner.{secrets.token_hex(6)}")
        try:
            with temporary.open("x", encoding="utf-8") as file:
                json.dump(asdict(self._me), file)
            os.link(temporary, self.path)
            return True
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)

    def _wait_for_silence(self, previous: Owner | None) -> None:
        """Returns when the file has not been touched for `stale_seconds`, by the file system's own clock.

        That clock may have been set since the owner's last beat. So the file is watched for two beats at least, on this
        process's monotonic clock, and for `stale_seconds` at most.

        Raises:
            OwnedError: it was touched while this watched.
        """
        began = time.monotonic()
        try:
            first = self.path.stat().st_mtime
            while (watched := time.monotonic() - began) < self._stale_seconds:
                if watched >= 2 * self._beat_seconds and self._age() >= self._stale_seconds:
                    return
                time.sleep(min(self._beat_seconds / 2, 1.0))
                if self.path.stat().st_mtime != first:
                    raise OwnedError(_refusal(self.path, previous))
        except FileNotFoundError:
            return

    def _age(self) -> float:
        """Seconds since the owner's last beat: hosts' clocks differ, so a new file's timestamp says what time it is there."""
        with tempfile.NamedTemporaryFile(dir=self.path.parent, prefix=".owner") as file:
            return os.fstat(file.fileno()).st_mtime - self.path.stat().st_mtime

    def _remove(self, previous: Owner | None) -> None:
        """Removes a dead owner's file, but not that of a newer owner."""
        aside = self.path.with_name(f".owner.{os.getpid()}.{socket.gethostname()}")
        try:
            self.path.rename(aside)
        except FileNotFoundError:
            return
        if read(aside.parent, aside.name) != previous:
            with contextlib.suppress(FileExistsError):
                os.link(aside, self.path)
        aside.unlink()

    def _beat(self) -> None:
        while not self._end.wait(self._beat_seconds):
            found = read(self.path.parent)
            if found is not None and found != self._me:
                self.lost = found
                return
            with contextlib.suppress(OSError):  # an unavailable disk is reported by what writes to it
                os.utime(self.path)


def read(folder: Path, name: str = FILE) -> Owner | None:
    """The folder's owner; None if there is no file or it cannot be read."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Owner(**json.loads((folder / name).read_text(encoding="utf-8")))
    return None


def of_this_rank(folder: Path, environment: Mapping[str, str]) -> Ownership:
    """Rank 0's: on behalf of the command that started it, or of its own without one."""
    held = environment.get(VARIABLE)
    return Ownership(folder, Owner(**json.loads(held)) if held else None)


def gone(folder: Path) -> str:
    """The message for a run folder that was removed or renamed during its run."""
    return (
        f"run_dir {folder} is gone: it was removed or renamed while the run wrote there. A renamed one is continued by the "
        "same command with run_dir= its new name"
    )


def _refusal(path: Path, owner: Owner | None) -> str:
    who = f"belongs to a running job: {owner}" if owner is not None else f"is in use: {path} is being touched"
    return f"{path.parent} {who}. Stop that run first, or give this one another run_dir"
