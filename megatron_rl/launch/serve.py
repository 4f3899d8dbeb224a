"""A model server in a job of its own: started, waited for, and announced in a file once it answers.

    python -m megatron_rl.launch.serve FOLDER ADDRESS MODEL [options of vLLM's server]
    python -m megatron_rl.launch.serve FOLDER ADDRESS -- COMMAND...    another server; {port} in it becomes the port

`FOLDER/url` is there while the server answers: `http://ADDRESS:PORT`. slurm/serve.sbatch runs this.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from megatron_rl.runtime import disk, exit_codes
from megatron_rl.runtime.attempts import free_port

URL = "url"
_LOOK = 1.0  # seconds between two looks at a server that does not answer yet
_TELL = 60.0  # seconds between two messages about it
_GRACE = 20.0  # seconds for the server to end when asked
_SERVER = ("-m", "vllm.entrypoints.openai.api_server")


class _Stopped(Exception):
    pass


def serve(command: Sequence[str], port: int, address: str, folder: Path) -> int:
    """Runs the server until it ends or a signal asks it to; the exit code is REQUEUE for a signal, else the server's own
    (FAILED for 0: a server does not end by itself).

    Args:
        command: starts the server, which is to listen at `port` of this machine.
        address: of this machine, as others reach it.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped(signal.Signals(number).name)

    url = folder / URL
    url.unlink(missing_ok=True)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, stop)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        _wait_until_healthy(server, port)
        if server.poll() is None:
            disk.replace(url, f"http://{address}:{port}\n")
            print(f"megatron-rl: the server answers at http://{address}:{port}", file=sys.stderr, flush=True)
        code = server.wait()
        print(f"megatron-rl: the server has ended with exit code {code}", file=sys.stderr, flush=True)
        return exit_codes.FAILED if code == 0 else code if code > 0 else 128 - code
    except _Stopped as reason:
        print(f"megatron-rl: {reason}: the server ends", file=sys.stderr, flush=True)
        return exit_codes.REQUEUE
    finally:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        url.unlink(missing_ok=True)
        _end(server)


def _wait_until_healthy(server: subprocess.Popen[bytes], port: int) -> None:
    begin = told = time.monotonic()
    while server.poll() is None and not _answers(port):
        if time.monotonic() - told >= _TELL:
            told = time.monotonic()
            print(f"the server does not answer yet, {told - begin:.0f} s after its start", flush=True)
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


def _end(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_GRACE)
    with contextlib.suppress(ProcessLookupError):  # also what it has started
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def main(arguments: Sequence[str]) -> int:
    folder, address, *words = arguments
    port = free_port()
    if words[0] == "--":
        command = [word.replace("{port}", str(port)) for word in words[1:]]
    else:
        command = [sys.executable, *_SERVER, "--model", words[0], "--port", str(port), *words[1:]]
    return serve(command, port, address, Path(folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
