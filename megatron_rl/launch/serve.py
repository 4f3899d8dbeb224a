"""A model server in a job of its own: started, waited for, and announced in a file once it answers.

    python -m megatron_rl.launch.serve FOLDER ADDRESS MODEL [options of vLLM's server]
    python -m megatron_rl.launch.serve FOLDER ADDRESS -- COMMAND...    another server; {port} in it becomes the port

`FOLDER/url` is there while the server answers: `http://ADDRESS:PORT`. slurm/serve.sbatch runs this.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from megatron_rl.config.machine import count_gpus
from megatron_rl.runtime import compilers, disk, exit_codes
from megatron_rl.runtime.attempts import free_port
from megatron_rl.runtime.server import VLLM, end, wait_until_healthy

URL = "url"


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
        wait_until_healthy(server, port, lambda text: print(text, flush=True))
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
        end(server)


def main(arguments: Sequence[str]) -> int:
    folder, address, *words = arguments
    os.environ["PATH"] = compilers.search_path(os.environ)
    if count_gpus():
        os.environ |= compilers.cache_variables(os.environ)
    port = free_port()
    if words[0] == "--":
        command = [word.replace("{port}", str(port)) for word in words[1:]]
    else:
        command = [sys.executable, *VLLM, "--model", words[0], "--port", str(port), *words[1:]]
    return serve(command, port, address, Path(folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
