"""The process that Slurm starts, signals and waits for in a test, while a fork does the work (`warm.python`): python -I -S
stand_in.py SOCKET ARGUMENTS OF PYTHON. It imports little of the standard library, so that it starts at once."""

import contextlib
import json
import os
import signal
import socket
import sys


def main() -> None:
    door, *arguments = sys.argv[1:]
    blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
    files = [number for number in map(int, os.listdir("/proc/self/fd")) if number > 2 and is_open(number)]
    task = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd(), "blocked": blocked}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        channel.connect(door)
        given = json.dumps({**task, "numbers": files, "own_session": True})
        socket.send_fds(channel, [given.encode()], [1, 2, *files])
        rank = int(channel.recv(100))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            signal.signal(number, lambda number, frame: pass_on(rank, number))
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        code = int(channel.recv(100))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def is_open(number: int) -> bool:
    with contextlib.suppress(OSError):  # the folder itself was, while it was listed
        os.fstat(number)
        return True
    return False


def pass_on(rank: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(rank, number)


if __name__ == "__main__":
    main()
