"""The sandbox's inner side: gives up every right the program does not need, then runs it.

Started as a script in an isolated interpreter by `megatron_rl.rewards.sandbox`; imports the standard library only. All of it
is enforced by the kernel on this process: nothing a Python program does can take it back.

- Landlock: files of Python's own library and the system's shared libraries can be read, not those of packages; files
  in the scratch folder (the working directory) can be read and written. There no folder can be made, and no file removed or
  renamed: a file without a name takes room that the parent cannot see. Nothing else can be opened, `/proc` included.
- seccomp: system calls of a list only. No sockets, no new processes, no signals to others, no changes of ownership, limits or
  namespaces. A new thread waits until the parent has counted the others and allows it.
- resource limits: CPU time, address space, size of a file, open files.
"""

from __future__ import annotations

import _socket
import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys
import sysconfig
import types

# x86-64 system calls that a single process of pure computation needs. Those with conditions are in `_filter`.
_ALLOWED = (
    *(0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),  # read .. rt_sigreturn: files, memory, own signals
    *(17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28),  # pread .. madvise
    *(32, 33, 34, 35, 36, 37, 38, 39, 60, 63),  # dup, timers, getpid, exit, uname
    *(74, 75, 77, 78, 79, 80, 89, 96, 97, 98, 99, 100),  # sync, ftruncate, folders, times and usage
    *(102, 104, 107, 108, 110, 111, 115, 118, 120, 121, 124),  # user, group and process ids
    *(127, 128, 130, 131, 137, 138, 158),  # own signals, statfs, arch_prctl
    *(186, 201, 202, 204, 213, 217, 218, 219, 228, 229, 230, 231, 232, 233),  # threads, clocks, epoll, exit_group
    *(262, 267, 269, 270, 271, 273, 274, 290, 291, 292, 293, 309, 318, 324, 332, 334, 439),
)
_OPEN, _IOCTL, _CLONE, _FCNTL, _TGKILL, _OPENAT, _PRLIMIT64, _CLONE3 = 2, 16, 56, 72, 234, 257, 302, 435
_CLONE_THREAD = 0x10000
_WRITING = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC
_O_TMPFILE = os.O_TMPFILE & ~os.O_DIRECTORY
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 5, 6, 7, 1030)  # duplicate, flags, locks; not those that send signals
_AUDIT_ARCH_X86_64 = 0xC000003E

_LD_WORD, _JEQ, _JGE, _JSET, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06  # BPF
_ALLOW, _ERRNO, _KILL, _ASK = 0x7FFF0000, 0x00050000, 0x80000000, 0x7FC00000
_SECCOMP, _SET_FILTER, _NEW_LISTENER = 317, 1, 8
_NR, _ARCH, _ARG0, _ARG1, _ARG2 = 0, 4, 16, 24, 32  # offsets in seccomp_data; arguments are 64 bits, low half first

_READ_FILE, _READ_DIR, _WRITE_FILE, _MAKE_REG, _TRUNCATE = 1 << 2, 1 << 3, 1 << 1, 1 << 8, 1 << 14
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446

BAD_SYNTAX = 66  # exit code: the program does not compile

PRELUDE = """\
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
"""


class Refused(Exception):
    """The kernel cannot confine this process."""


def _limit(limits: dict[str, int]) -> None:
    for name, value in (
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(name, (value, value))


def _call(libc: ctypes.CDLL, what: str, number: int, *args: object) -> int:
    result = int(libc.syscall(number, *args))
    if result < 0:
        raise Refused(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def _libraries() -> list[tuple[str, int]]:
    """Folders and files that a program may read, with the rights: Python's own library and shared libraries.

    A right holds for everything below a folder, so in a folder that also has installed packages each other entry is granted
    by name. Of a library's folder itself only the names can be read: importing needs them.
    """
    own = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    system = {os.path.realpath(path) for path in ("/lib", "/lib64", "/usr/lib", "/usr/lib64")}
    grants = [(path, _READ_DIR) for path in sorted(own)]
    for folder in sorted(own | system):
        if not os.path.isdir(folder):
            continue
        with os.scandir(folder) as entries:
            for entry in entries:
                packages = entry.name.startswith("python") if folder in system else entry.name.endswith("-packages")
                if not packages:
                    grants.append((entry.path, _READ_FILE | (_READ_DIR if entry.is_dir() else 0)))
    return grants


def _landlock(libc: ctypes.CDLL, scratch: str) -> None:
    try:
        version = _call(libc, "Landlock", _LANDLOCK_CREATE, None, 0, 1)
    except Refused as error:
        raise Refused(f"{error}; it needs Linux 5.13 or newer with `landlock` among its security modules") from None
    bits = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)  # file rights that it knows: all are denied by default
    attributes = [(1 << bits) - 1]
    if version >= 4:
        attributes.append(0b11)  # TCP: bind, connect
    if version >= 6:
        attributes.append(0b11)  # abstract sockets and signals to outside
    packed = struct.pack(f"<{len(attributes)}Q", *attributes)
    rules = _call(libc, "Landlock rules", _LANDLOCK_CREATE, packed, len(packed), 0)
    readable = _READ_FILE | _READ_DIR
    grants = [*_libraries(), ("/usr/share/zoneinfo", readable)]
    grants += [(path, _READ_FILE) for path in ("/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/zero")]
    grants += [("/dev/null", _READ_FILE | _WRITE_FILE)]
    grants += [(scratch, readable | _WRITE_FILE | _MAKE_REG | (_TRUNCATE if version >= 3 else 0))]
    for path, rights in grants:
        if os.path.exists(path):
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            _call(libc, f"Landlock rule for {path}", _LANDLOCK_ADD, rules, 1, struct.pack("<Qi", rights, fd), 0)
            os.close(fd)
    _call(libc, "Landlock", _LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def _instruction(code: int, value: int, when: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("<HBBI", code, when, otherwise, value)


def _ask_for_threads(libc: ctypes.CDLL, parent: int) -> None:
    """Makes every `clone` wait for an answer, and sends the descriptor to answer by to the parent; see `sandbox._Threads`.

    Args:
        parent: descriptor of a Unix socket.
    """
    program = _instruction(_LD_WORD, _NR) + _instruction(_JEQ, _CLONE, 0, 1)
    program += _instruction(_RETURN, _ASK) + _instruction(_RETURN, _ALLOW)
    code = ctypes.create_string_buffer(program)
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    listener = _call(libc, "seccomp's notifications", _SECCOMP, _SET_FILTER, _NEW_LISTENER, header)
    channel = _socket.socket(fileno=parent)
    channel.sendmsg([b"t"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("i", listener))])
    channel.close()
    os.close(listener)


def _filter(pid: int, *, confined: bool) -> bytes:
    """The list of system calls, as a program of seccomp's.

    Args:
        confined: Landlock says which files can be opened, and the parent how many threads there are. False: files are
            opened to be read only, and no thread is started.
    """
    instruction = _instruction
    refuse, allow = instruction(_RETURN, _ERRNO | errno.EPERM), instruction(_RETURN, _ALLOW)
    program = [
        instruction(_LD_WORD, _ARCH),
        instruction(_JEQ, _AUDIT_ARCH_X86_64, 1, 0),
        instruction(_RETURN, _KILL),
        instruction(_LD_WORD, _NR),
        instruction(_JGE, 0x40000000, 0, 1),  # the x32 numbers
        instruction(_RETURN, _KILL),
    ]
    for number in _ALLOWED:
        program += [instruction(_JEQ, number, 0, 1), allow]
    program += [instruction(_JEQ, _IOCTL, 0, 1), instruction(_RETURN, _ERRNO | errno.ENOTTY)]  # nothing is a terminal
    program += [instruction(_JEQ, _CLONE3, 0, 1), instruction(_RETURN, _ERRNO | errno.ENOSYS)]  # libc then takes clone
    threads = (
        [instruction(_LD_WORD, _ARG0), instruction(_JSET, _CLONE_THREAD, 0, 1), allow, refuse] if confined else [refuse]
    )
    own_signals = [instruction(_LD_WORD, _ARG0), instruction(_JEQ, pid, 0, 1), allow, refuse]
    read_limits = [
        *(instruction(_LD_WORD, _ARG2), instruction(_JEQ, 0, 0, 3)),
        *(instruction(_LD_WORD, _ARG2 + 4), instruction(_JEQ, 0, 0, 1), allow, refuse),
    ]

    def opening(flags: int) -> list[bytes]:
        if not confined:
            return [instruction(_LD_WORD, flags), instruction(_JSET, _WRITING, 0, 1), refuse, allow]
        # Neither to read nor to write (3), or truncated while reading: before Linux 6.2 Landlock does not stop that. A file
        # without a name is not made either.
        odd = (os.O_TRUNC, os.O_ACCMODE, os.O_TRUNC | os.O_ACCMODE)
        checks = [instruction(_JEQ, value, len(odd) - i, 0) for i, value in enumerate(odd)]
        unnamed = [instruction(_LD_WORD, flags), instruction(_JSET, _O_TMPFILE, 0, 1), refuse]
        return [*unnamed, instruction(_AND, os.O_TRUNC | os.O_ACCMODE), *checks, allow, refuse]

    commands = [instruction(_LD_WORD, _ARG1)]
    for command in _FCNTL_COMMANDS:
        commands += [instruction(_JEQ, command, 0, 1), allow]
    commands.append(refuse)
    for number, block in (
        (_OPEN, opening(_ARG1)),
        (_OPENAT, opening(_ARG2)),
        (_CLONE, threads),
        (_TGKILL, own_signals),
        (_PRLIMIT64, read_limits),
        (_FCNTL, commands),
    ):
        program += [instruction(_JEQ, number, 0, len(block)), *block]
    program.append(refuse)
    return b"".join(program)


def confine(scratch: str, limits: dict[str, int], parent_fd: int) -> None:
    """Give up all rights but those of the module's docstring, for good.

    Args:
        scratch: the folder to write in.
        limits: `cpu_seconds`, `memory_bytes`, `file_bytes`.
        parent_fd: a Unix socket to the parent, which allows threads; closed.

    Raises:
        Refused: this kernel or processor cannot confine the process.
    """
    libc = _libc()
    parent = os.getppid()
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: the program ends with the process that started it
    if os.getppid() != parent:
        raise Refused("the process that started the program is gone")
    _gain_nothing(libc)
    _limit(limits)
    _landlock(libc, scratch)
    _ask_for_threads(libc, parent_fd)
    _install(libc, _filter(os.getpid(), confined=True))


def refuse_all_but_computing() -> None:
    """Gives up, for good, every system call of this process but those of a computation that reads files.

    Unlike `confine` it leaves all files readable, and asks the kernel for seccomp only. Files are opened to be read, no
    thread is started.

    Raises:
        Refused: this kernel or processor cannot do it.
    """
    libc = _libc()
    _gain_nothing(libc)
    _install(libc, _filter(os.getpid(), confined=False))


def _libc() -> ctypes.CDLL:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise Refused(f"the sandbox is for Linux on x86-64, not {sys.platform} on {platform.machine()}")
    return ctypes.CDLL(None, use_errno=True)


def _gain_nothing(libc: ctypes.CDLL) -> None:
    """No program that is started has more rights than this one, which the kernel asks for before it takes a filter."""
    if libc.prctl(38, 1, 0, 0, 0):  # PR_SET_NO_NEW_PRIVS
        raise Refused(f"no_new_privs: {os.strerror(ctypes.get_errno())}")


def _install(libc: ctypes.CDLL, program: bytes) -> None:
    code = ctypes.create_string_buffer(program)
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    if libc.prctl(22, 2, header, 0, 0):  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        raise Refused(f"seccomp: {os.strerror(ctypes.get_errno())}")


def main(job_fd: int, refusal_fd: int, result_fd: int, parent_fd: int) -> None:
    """Run a job (JSON).

    Args:
        job_fd: descriptor to read the job from.
        refusal_fd: where to say why this process cannot be confined; closed before the program starts.
        result_fd: where to write what a called function returned, as JSON.
        parent_fd: a Unix socket to the parent, which allows threads.
    """
    with os.fdopen(job_fd, "rb") as file:
        job = json.loads(file.read())
    try:
        confine(os.getcwd(), job["limits"], parent_fd)
    except Refused as error:
        os.write(refusal_fd, str(error).encode())
        os._exit(1)
    os.close(refusal_fd)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["program.py"]
    try:
        program = compile(job["code"], "program.py", "exec")
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(BAD_SYNTAX)
    if job["function"] is None:
        os.close(result_fd)
        exec(program, module.__dict__)
        return
    exec(PRELUDE, module.__dict__)
    module.__dict__["__name__"] = "program"  # a `__main__` block is not what is tested
    common = dict(module.__dict__)
    exec(program, module.__dict__)
    name = job["function"]
    own = module.__dict__.get(name) is not common.get(name)
    function = module.__dict__[name] if own else getattr(module.__dict__["Solution"](), name)
    value = json.dumps(function(*job["arguments"])).encode()
    while value:
        value = value[os.write(result_fd, value) :]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
