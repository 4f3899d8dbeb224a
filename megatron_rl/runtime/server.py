"""A model server in a process of its own: waited for, and ended with all that it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
from collections.abc import Callable
from typing import Protocol

from megatron_rl.runtime import fetch, process

VLLM = ("-m", "vllm.entrypoints.openai.api_server")  # after the Python that runs it
_LOOK = 1.0  # seconds between two looks at a server that does not answer yet
_TELL = 60.0  # seconds between two messages about it
_GRACE = 20.0  # seconds for the server to end when asked, and for the tracker of its shared memory after it
_POLL = 0.02  # seconds between two looks at what is left of a session
_TRACKER = b"multiprocessing.resource_tracker"  # in the command of the process that unlinks names in shared memory


def wait_until_healthy(server: subprocess.Popen[bytes], port: int, tell: Callable[[str], None]) -> None:
    """Until the server answers at `port` of this machine, or has ended."""
    begin = told = time.monotonic()
    while server.poll() is None and not _answers(port):
        if time.monotonic() - told >= _TELL:
            told = time.monotonic()
            tell(f"the server does not answer yet, {told - begin:.0f} s after its start")
        time.sleep(_LOOK)


def _answers(port: int) -> bool:
    """Whether /health is fine, elsewhere or unknown to the server; vLLM listens once its model is loaded."""
    try:
        fetch.get(f"http://127.0.0.1:{port}/health", None, 5.0)
        return True
    except urllib.error.HTTPError as error:
        return error.code < 400 or error.code == 404
    except (OSError, ValueError):
        return False


class Leader(Protocol):
    """The part in use of a `subprocess.Popen` that leads a session."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...


def end(leader: Leader) -> None:
    """Ends a process that leads a session, and what it has started, with the names that these had in shared memory.

    Python's resource tracker unlinks those names, once the other processes have ended: it ends last, by itself.
    """
    if leader.poll() is None:
        os.kill(leader.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            leader.wait(_GRACE)
    begin = time.monotonic()
    while (running := process.session(leader.pid)) and time.monotonic() - begin < 2 * _GRACE:
        for pid, command in running.items():
            if _TRACKER not in command or time.monotonic() - begin > _GRACE:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL)
    leader.wait()
