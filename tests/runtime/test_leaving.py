"""A process that leaves its memory to the system ends in all else as one that Python takes apart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """\
import atexit, sys, tempfile, threading, time
from megatron_rl.runtime import leaving

def log(path):
    file = open(path, "w")
    file.write("kept")
    return lambda: file

folder = sys.argv[1]
reward = log(f"{folder}/frozen")
leaving.freeze()
later = log(f"{folder}/later")
raw = open(f"{folder}/binary", "wb")
raw.write(b"kept")
log(f"{folder}/closed")().close()
full = log("/dev/full")
temporary = tempfile.TemporaryDirectory(dir=folder)
atexit.register(lambda: print("at exit"))
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread"))).start()
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
class Lazy:
    @property
    def __class__(self):
        print("asked", flush=True)
        return object
lazy = Lazy()
print("main", end=" ")
leaving.leave(7)
"""


def test_threads_exit_functions_and_buffers_have_their_end(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7
    assert all("/dev/full" in line and "No space left on device" in line for line in done.stderr.splitlines())
    assert done.stderr
    assert done.stdout.split("\n") == ["main a thread", "at exit", ""]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        ("frozen", "later", "binary", "closed"), "kept"
    )
