"""Programs nobody has read: what they may do, and forty things they may not."""

from __future__ import annotations

import os
import sysconfig
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.rewards.sandbox import Limits, _bytes_in, run_program

LIMITS = Limits(cpu_seconds=1, wall_seconds=4.0, memory_mib=256, output_mib=1, scratch_mib=4)


def test_a_script_reads_and_prints() -> None:
    outcome = run_program("print(int(input()) * 2)", stdin="21\n")
    assert (outcome.status, outcome.stdout) == ("ok", "42\n")


def test_a_function_or_method_is_called() -> None:
    assert run_program("def f(a, b):\n    return a, b", function="f", arguments=[1, [2]]).value == [1, [2]]
    code = "class Solution:\n    def count(self, a: List[int]) -> int:\n        return len(Counter(a))\n"
    code += "if __name__ == '__main__':\n    1/0"
    assert run_program(code, function="count", arguments=[[1, 1, 2]]).value == 2


@pytest.mark.parametrize(
    "code",
    [
        "import sys, threading\nthreading.stack_size(1 << 27)\nsys.setrecursionlimit(10**6)\n"
        "def f(n): return n and 1 + f(n - 1)\nt = threading.Thread(target=lambda: print(f(20000)))\nt.start(); t.join()",
        "open('a', 'w').write('1'); print(open('a').read()); open('a', 'w').write('22'); assert open('a').read() == '22'",
        "import asyncio, datetime, decimal, heapq, random, re, statistics, tempfile, zoneinfo; print(random.random() < 1)",
        "from concurrent.futures import ThreadPoolExecutor as P\nprint(*P(2).map(abs, [-1, 2]))",
        "import time; time.sleep(0.01); print(time.time() > 0)",
        "import sys; print(1); sys.exit(0)",
        "import signal; signal.signal(signal.SIGALRM, lambda *a: print(1)); signal.setitimer(0, .01); signal.pause()",
    ],
)
def test_what_programs_usually_do_works(code: str) -> None:
    outcome = run_program(code)
    assert outcome.status == "ok", outcome.error
    assert outcome.stdout


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("print(1", "syntax"),
        ("x = '\ud800'", "syntax"),
        ("(" * 5000, "syntax"),
        ("1 / 0", "error"),
        ("import sys; sys.exit(3)", "error"),
        ("import os; os.abort()", "error"),
        ("import ctypes; ctypes.string_at(0)", "error"),
        ("def f(): f()\nf()", "error"),
        ("import numpy", "error"),
    ],
)
def test_a_program_that_fails(code: str, status: str) -> None:
    assert run_program(code, limits=LIMITS).status == status


def test_a_function_that_returns_nothing_json_can_hold() -> None:
    for code in (
        "def f(): return {1}",
        "def f(): return f",
        "def f(): raise SystemExit",
        "import os; os._exit(0)",
        "g = 1",
    ):
        assert run_program(code, function="f").status == "error"


# Each must end as an error or over a limit; and if it prints BROKEN, it got what it must not have.
HOSTILE = {
    "fork": "import os; os.fork(); print('BROKEN')",
    "fork bomb": "import os\nwhile True: os.fork(); print('BROKEN')",
    "vfork by ctypes": "import ctypes; r = ctypes.CDLL(None).vfork(); print('BROKEN') if r >= 0 else 1/0",
    "clone by number": "import ctypes; r = ctypes.CDLL(None).syscall(56, 17, 0, 0, 0, 0); print('BROKEN') if r >= 0 else 1/0",
    "clone3": "import ctypes; r = ctypes.CDLL(None).syscall(435, b'\\0' * 88, 88); print('BROKEN') if r >= 0 else 1/0",
    "multiprocessing": "import multiprocessing as m; p = m.Process(target=print); p.start(); p.join(); print('BROKEN')",
    "subprocess": "import subprocess; print('BROKEN', subprocess.run(['/bin/ls']))",
    "system": "import os; r = os.system('echo BROKEN'); assert r == 0",
    "exec": "import os; os.execv('/bin/echo', ['echo', 'BROKEN'])",
    "thread bomb": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
    "memory bomb": "a = bytearray(1 << 33); print('BROKEN')",
    "memory bomb, slowly": "a = []\nwhile True: a.append(bytearray(1 << 20))",
    "memory by mmap": "import mmap; a = mmap.mmap(-1, 1 << 33); print('BROKEN')",
    "memfd": "import os; os.memfd_create('a'); print('BROKEN')",
    "big number": "print('BROKEN', 9 ** 9 ** 9 ** 9)",
    "busy loop": "while True: pass",
    "busy loop in C": "sum(range(10**12))",
    "busy loop, signals ignored": "import signal\n"
    "for s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
    "sleep": "import time; time.sleep(999)",
    "wait for input": "import signal; signal.pause()",
    "endless output": "while True: print('x' * 10**6)",
    "endless errors": "import sys\nwhile True: print('x' * 10**6, file=sys.stderr)",
    "big file": "f = open('a', 'wb')\nwhile True: f.write(bytes(1 << 20))",
    "sparse file": "f = open('a', 'wb'); f.truncate(1 << 40); print('BROKEN')",
    "many files": "i = 0\nwhile True:\n    i += 1\n    with open(str(i), 'wb') as f: f.write(bytes(10**6))",
    "files without names": "import os\nopen('a', 'w'); os.remove('a'); print('BROKEN')",
    "files without names, by folder": "import os\nopen('a', 'w'); os.unlink('a', dir_fd=os.open('.', 0)); print('BROKEN')",
    "files without names, replaced": "import os\nopen('a', 'w'); open('b', 'w'); os.replace('a', 'b'); print('BROKEN')",
    "files without names from the start": "import os; os.open('.', os.O_TMPFILE | os.O_RDWR); print('BROKEN')",
    "installed packages": "import sys; sys.path += {packages!r}; import {package}; print('BROKEN')",
    "folders": "import os; os.mkdir('a'); print('BROKEN')",
    "symbolic link": "import os; os.symlink('/etc', 'a'); print('BROKEN')",
    "environment": "import os; assert not set(os.environ) - {'LANG', 'LC_CTYPE'}, print('BROKEN', dict(os.environ)); 1/0",
    "parent's environment": "import os; print('BROKEN', open(f'/proc/{os.getppid()}/environ', 'rb').read())",
    "own memory": "print('BROKEN', open('/proc/self/mem', 'rb'))",
    "parent's memory": "import os; print('BROKEN', open(f'/proc/{os.getppid()}/mem', 'rb'))",
    "password file": "print('BROKEN', open('/etc/passwd').read())",
    "home": "import os; print('BROKEN', os.listdir(os.path.expanduser('~root')))",
    "root folder": "import os; print('BROKEN', os.listdir('/'))",
    "this file": "print('BROKEN', open({this!r}).read())",
    "write outside": "open({outside!r}, 'w').write('x'); print('BROKEN')",
    "write beside": "open('../' + {name!r}, 'w').write('x'); print('BROKEN')",
    "remove outside": "import os; os.remove({victim!r}); print('BROKEN')",
    "truncate outside": "import os; os.truncate({victim!r}, 0); print('BROKEN')",
    "truncate while reading": "import os; open('a', 'w').write('x'); os.open('a', os.O_TRUNC); print('BROKEN')",
    "open for nothing": "import os; os.open({victim!r}, 3); print('BROKEN')",
    "truncate, opened for nothing": "import os; os.open({victim!r}, 3 | os.O_TRUNC); print('BROKEN')",
    "change mode": "import os; os.chmod({victim!r}, 0); print('BROKEN')",
    "change owner": "import os; os.chown({victim!r}, 1, 1); print('BROKEN')",
    "change times": "import os; os.utime({victim!r}, (0, 0)); print('BROKEN')",
    "attributes": "import os; os.setxattr({victim!r}, 'user.a', b'b'); print('BROKEN')",
    "link out": "import os; os.link({victim!r}, 'a'); print('BROKEN')",
    "shared memory": "open('/dev/shm/sandbox-test', 'w'); print('BROKEN')",
    "kill the parent": "import os, signal; os.kill(os.getppid(), signal.SIGTERM); print('BROKEN')",
    "kill everyone": "import os; os.kill(-1, 9); print('BROKEN')",
    "signal by descriptor owner": "import fcntl, os; r, w = os.pipe(); fcntl.fcntl(r, 8, os.getppid()); print('BROKEN')",
    "trace the parent": "import ctypes, os; r = ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0)\n"
    "print('BROKEN') if r == 0 else 1/0",
    "socket": "import socket; socket.socket(); print('BROKEN')",
    "unix socket": "import socket; socket.socketpair(); print('BROKEN')",
    "name lookup": "import socket; print('BROKEN', socket.getaddrinfo('localhost', 80))",
    "new session": "import os; os.setsid(); print('BROKEN')",
    "namespaces": "import ctypes; r = ctypes.CDLL(None).unshare(0x10000000); print('BROKEN') if r == 0 else 1/0",
    "higher limits": "import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1)); print('BROKEN')",
    "another user": "import os; os.setuid(1); print('BROKEN')",
    "no more protection": "import ctypes; r = ctypes.CDLL(None).prctl(22, 0, 0, 0, 0); print('BROKEN') if r == 0 else 1/0",
    "mount": "import ctypes; r = ctypes.CDLL(None).mount(b'a', b'.', b'tmpfs', 0, 0); print('BROKEN') if r == 0 else 1/0",
    "io_uring": "import ctypes; r = ctypes.CDLL(None).syscall(425, 8, bytes(256)); print('BROKEN') if r >= 0 else 1/0",
    "32-bit numbers": "import ctypes; r = ctypes.CDLL(None).syscall(0x40000000 | 57); print('BROKEN') if r >= 0 else 1/0",
    "terminal input": "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSTI, b'x'); print('BROKEN')",
}


def installed() -> tuple[list[str], str]:
    """Folders with installed packages beside Python's own library or the system's, and a package in the last of them."""
    below = [Path(sysconfig.get_path("stdlib")), *Path("/usr/lib").glob("python3*")]
    folders = [folder for path in below for folder in path.glob("*-packages") if folder.is_dir()]
    names = [path.parent.name for folder in folders for path in folder.glob("*/__init__.py")]
    return [str(folder) for folder in folders], (names or ["pip"])[-1]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_get_nothing(name: str, tmp_path: Path) -> None:
    victim, outside = tmp_path / "victim", tmp_path / "outside"
    victim.write_text("precious")
    before = victim.stat()
    code = HOSTILE[name]
    packages, package = installed()
    code = code.replace("{packages!r}", repr(packages)).replace("{package}", package)
    for key, value in (("this", __file__), ("outside", str(outside)), ("victim", str(victim)), ("name", "beside")):
        code = code.replace(f"{{{key}!r}}", repr(value))
    limits = (
        replace(LIMITS, wall_seconds=1.0) if name in ("sleep", "wait for input") else LIMITS
    )  # the clock ends these
    start, children = time.monotonic(), _children()
    outcome = run_program(code, limits=limits)
    assert outcome.status in ("error", "time", "disk"), outcome
    assert "BROKEN" not in outcome.stdout
    assert "BROKEN" not in outcome.error or "print('BROKEN" in outcome.error
    assert time.monotonic() - start < limits.wall_seconds + 5
    after = victim.stat()
    assert victim.read_text() == "precious"
    assert (after.st_mode, after.st_uid, after.st_mtime, after.st_nlink) == (
        before.st_mode,
        before.st_uid,
        before.st_mtime,
        before.st_nlink,
    )
    assert not outside.exists()
    assert _children() <= children


def _children() -> set[str]:
    """Processes of the test run itself: other tests may have left a helper that is still warm."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    descriptors = len(os.listdir("/proc/self/fd"))
    for code in ("open('a', 'w').write('x')", "1/0", "while True: pass"):
        run_program(code, limits=LIMITS)
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_all_files_in_the_scratch_folder_count(tmp_path: Path) -> None:
    for name, size in (("a", 10), ("b", 3)):
        (tmp_path / name).write_bytes(bytes(size))
    assert _bytes_in(str(tmp_path)) == 2 * 4096 + 13
    slowly = "import time\nfor i in range(999):\n    open(str(i), 'wb').write(bytes(900_000)); time.sleep(0.01)"
    assert run_program(slowly, limits=LIMITS).status == "disk"


def test_the_answer_is_not_there_to_be_read() -> None:
    """The expected result never enters the process: a program can print whatever it likes."""
    code = "import gc\nprint([o for o in gc.get_objects() if isinstance(o, dict) and 'outputs' in o and o is not globals()])"
    assert run_program(code).stdout == "[]\n"


@pytest.mark.parametrize("stack", [0, 32768])
def test_threads_are_counted_and_end(stack: int) -> None:
    """32 programs at once would otherwise use up a machine's process ids, and with them the trainer's own threads."""
    start = f"import threading, time\nthreading.stack_size({stack})\nn = 1\n"
    code = (
        start + "try:\n"
        "    while True: threading.Thread(target=time.sleep, args=(99,), daemon=True).start(); n += 1\n"
        "except RuntimeError: print(n)"
    )
    outcome = run_program(code, limits=Limits(threads=20, memory_mib=4096))
    assert (outcome.status, outcome.stdout) == ("ok", "20\n")
    code = start + "for _ in range(99):\n    t = threading.Thread(target=int); t.start(); t.join()\nprint('done')"
    assert run_program(code, limits=Limits(threads=20)).stdout == "done\n", "only those alive at a time count"


def test_threads_that_start_threads_are_counted_together() -> None:
    code = (
        "import threading, time\nthreading.stack_size(32768)\ndef f():\n    try:\n"
        "        while True: threading.Thread(target=f, daemon=True).start()\n    except RuntimeError: time.sleep(1)\n"
        "f()\nprint(threading.active_count())"
    )
    outcome = run_program(code, limits=Limits(threads=20, memory_mib=4096))
    assert outcome.status == "ok"
    assert int(outcome.stdout) <= 20


def test_limits_are_those_that_were_asked_for() -> None:
    code: Any = "a = bytearray(100 << 20); print(len(a))"
    assert run_program(code, limits=Limits(memory_mib=512)).status == "ok"
    assert run_program(code, limits=Limits(memory_mib=80)).status == "error"
    code = "print('x' * (3 << 20))"
    assert run_program(code, limits=Limits(output_mib=4)).status == "ok"
    assert run_program(code, limits=Limits(output_mib=2)).status == "error"
