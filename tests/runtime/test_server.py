"""A server's end takes all that it has started with it, and their names in shared memory."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_rl.runtime import process, server
from tests import shared_memory

# As vLLM's server: its engine has segments, of which Python's resource tracker knows; asked to end, it leaves the engine.
SERVER = """
import os, signal, sys, time
from multiprocessing import shared_memory
segment = shared_memory.SharedMemory(create=True, size=100)
if os.fork() == 0:  # the engine
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)
signal.signal(signal.SIGTERM, lambda number, frame: os._exit(3))
print(segment.name, flush=True)
signal.pause()
"""


def start(script: str) -> tuple[subprocess.Popen[bytes], str]:
    leader = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    assert leader.stdout is not None
    return leader, leader.stdout.readline().decode().strip()


@pytest.mark.parametrize("killed", [False, True], ids=["asked to end", "killed by another"])
def test_nothing_of_a_server_is_left(killed: bool) -> None:
    leader, name = start(SERVER)
    session = process.session(leader.pid)
    assert len(session) == 3  # the tracker too
    assert name in shared_memory.held(session)
    assert name not in shared_memory.held([os.getpid()])
    if killed:
        leader.kill()
    begin = time.monotonic()
    server.end(leader)
    assert leader.returncode == (-9 if killed else 3)
    assert process.session(leader.pid) == {}
    assert name not in shared_memory.names()
    assert time.monotonic() - begin < 5


def test_a_server_that_does_not_end_when_asked_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_GRACE", 3.0)  # the tracker's, too, on a machine that has much else to do
    leader, name = start(SERVER.replace("lambda number, frame: os._exit(3)", "signal.SIG_IGN"))
    server.end(leader)
    assert leader.returncode == -9
    assert name not in shared_memory.names()


@pytest.mark.parametrize(
    ("reply", "answers"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", True),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", True),
        (b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /health/\r\n\r\n", True),
        (b"HTTP/1.1 503 Loading\r\n\r\n", False),
        (b"hello there\r\n\r\n", False),
    ],
)
def test_a_server_is_asked_itself_whatever_it_says(
    reply: bytes, answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def talk() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(reply)

        threading.Thread(target=talk, daemon=True).start()
        assert server._answers(listening.getsockname()[1]) == answers


LEAVING = """
import subprocess, sys

MAKE = "from multiprocessing import resource_tracker as r, shared_memory as s; import sys, time\\n" \
    "m = s.SharedMemory(create=True, size=9); r.unregister(m._name, 'shared_memory'); print(m.name); time.sleep(1.5)\\n" \
    "if len(sys.argv) > 1: m._name and s._posixshmem.shm_unlink(m._name)"

def test_it():
    for arguments in ([], ["removes it"]):
        made = subprocess.run([sys.executable, "-c", MAKE, *arguments], capture_output=True, text=True, check=True)
        print("made", made.stdout)
"""


def test_a_session_of_tests_that_leaves_a_name_fails_by_it(tmp_path: Path) -> None:
    """Not by one that another program makes meanwhile, nor by one that was removed."""
    (tmp_path / "test_it.py").write_text(LEAVING)
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-p", "tests.shared_memory"]
    tests = subprocess.Popen([*command, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    time.sleep(1)
    others = shared_memory.FOLDER / f"others-{os.getpid()}"
    with others.open("w"):
        output, _ = tests.communicate()
    others.unlink()
    left, removed = (line.split()[-1] for line in output.splitlines() if "made psm_" in line)
    (shared_memory.FOLDER / left).unlink()
    assert not (shared_memory.FOLDER / removed).exists()
    assert tests.returncode == 1
    assert "1 passed" in output
    assert f"still in /dev/shm: {left}\n" in output
