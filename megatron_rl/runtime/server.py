"""A model server in a process of its own: waited for, and ended with all that it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable

VLLM = ("-m", "vllm.entrypoints.openai.api_server")  # after the Python that runs it
_LOOK = 1.0  # seconds between two looks at a server that does not answer yet
_TELL = 60.0  # seconds between two messages about it
_GRACE = 20.0  # seconds for the server to end when asked


def wait_until_healthy(server: subprocess.Popen[bytes], port: int, tell: Callable[[str], None]) -> None:
    """Until the server answers at `port` of this machine, or has ended."""
    begin = told = time.monotonic()
    while server.poll() is None and not _answers(port):
        if time.monotonic() - told >= _TELL:
            told = time.monotonic()
            tell(f"the server does not answer yet, {told - begin:.0f} s after its start")
        time.sleep(_LOOK)


def _answers(port: int) -> bool:
    """Whether /health is fine or unknown to the server; vLLM listens once its model is loaded."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5.0):
            return True
    except urllib.error.HTTPError as error:
        return error.code == 404
    except OSError:
        return False


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that leads a session, and what it has started."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    with contextlib.suppress(ProcessLookupError):  # also what it has started
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
