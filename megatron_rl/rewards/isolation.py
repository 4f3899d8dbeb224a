"""A function in a process of its own, with a deadline that holds.

Verifiers of mathematics and puzzles evaluate what a model wrote. They can hang inside C code, where neither a thread nor
a signal handler stops them, and some of them evaluate it as Python. So they run in a helper process that is killed when
its deadline is past, and started again; that has a bare environment and a memory limit; and that cannot start programs,
write files, open connections or send signals: the kernel refuses those system calls (seccomp), as in the code sandbox, and
an audit hook before it says what was refused. Requests go to the helper pickled, answers come back as JSON: nothing that
the helper sends is executed, and a value that is no number within the function's bounds is an error.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import pickle
import re
import resource
import secrets
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Any, BinaryIO, Unpack

from pydantic import Field

from megatron_rl.rewards import sandbox_child
from megatron_rl.rewards.kinds import ANY, Bounds, Declared, PooledReward, SampleMapping, Score, ScoreFunction

_START_SECONDS = 120.0  # imports of the helper, on a busy machine
_MEMORY_BYTES = 4 << 30
Timeout = Annotated[float, Field(ge=0.01)]
_HEADER = struct.Struct("<Id")  # bytes of the request, its deadline in seconds


class RewardProcessError(RuntimeError):
    """The helper process failed: an exception of the function itself, or a helper that cannot start."""


class Isolated:
    """Calls `module:function` in a helper process; one helper per instance, started at the first call.

    Safe to use from several threads; calls take turns. The function must return a number or bool.

    Args:
        function: `package.module:function`.
        imports: modules the helper imports when it starts, before any deadline begins.
        timeout_seconds: deadline of one call; past it the helper is killed and the call returns 0, as it does where it
            exhausted the helper's memory.
        bounds: the least and the greatest value that the function can return.

    Attributes:
        timeouts: calls so far without an answer from the helper.
    """

    def __init__(self, function: str, imports: tuple[str, ...], timeout_seconds: float, bounds: Bounds = ANY) -> None:
        self.function = function
        self.imports = imports
        self.timeout_seconds = timeout_seconds
        self.bounds = bounds
        self.timeouts = 0
        self._lock = threading.Lock()
        self._helper: subprocess.Popen[bytes] | None = None

    def __call__(self, *args: object) -> float:
        """The function's result on picklable arguments.

        Raises:
            RewardProcessError: the function raised or returned no number within the bounds, or the helper cannot start.
        """
        token = secrets.token_hex(8)  # on the answer: what the function printed or wrote itself has none
        request = pickle.dumps((token, args))
        with self._lock:
            helper = self._started()
            answer = None
            with contextlib.suppress(BrokenPipeError):
                assert helper.stdin is not None
                helper.stdin.write(_HEADER.pack(len(request), self.timeout_seconds) + request)
                helper.stdin.flush()
                answer = self._read_line(helper, self.timeout_seconds)
            if answer is None or answer.get("to") != token:
                self._stop()
                self.timeouts += 1
                return 0.0
        if "error" in answer:
            raise RewardProcessError(f"{self.function}: {answer['error']}")
        value = answer.get("value")
        if not isinstance(value, float) or not math.isfinite(value) or not self.bounds[0] <= value <= self.bounds[1]:
            self.close()  # whatever made that value may make others
            low, high = self.bounds
            raise RewardProcessError(
                f"{self.function}: returned {value!r:.80}, no finite number in [{low:g}, {high:g}]"
            )
        return value

    def _started(self) -> subprocess.Popen[bytes]:
        if self._helper is not None and self._helper.poll() is None:
            return self._helper
        self._stop()
        environment = {key: os.environ[key] for key in ("PATH", "HOME", "LANG", "PYTHONPATH") if key in os.environ}
        helper = subprocess.Popen(
            [sys.executable, "-m", "megatron_rl.rewards.isolation", self.function, *self.imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,  # a Ctrl-C in the terminal is the trainer's to handle
        )
        self._helper = helper
        weakref.finalize(self, _end, helper)
        greeting = self._read_line(helper, _START_SECONDS)
        if greeting is None or "error" in greeting:
            self._stop()
            reason = greeting["error"] if greeting else "it ended, or did not answer in time"
            raise RewardProcessError(f"the helper process for {self.function} does not start: {reason}")
        return helper

    def _read_line(self, helper: subprocess.Popen[bytes], seconds: float) -> dict[str, Any] | None:
        """One JSON line from the helper; None where it ends, writes anything else, or does not finish the line in time."""
        assert helper.stdout is not None
        deadline = time.monotonic() + seconds
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(helper.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                chunk = os.read(helper.stdout.fileno(), 65536)
                if not chunk:
                    return None
                line += chunk
        try:
            answer = json.loads(line)
        except ValueError:  # the evaluated text wrote to stdout too
            return None
        return answer if isinstance(answer, dict) else None

    def _stop(self) -> None:
        if self._helper is not None:
            _end(self._helper)
            self._helper = None

    def close(self) -> None:
        """End the helper process, if there is one; the next call starts another."""
        with self._lock:
            self._stop()


class IsolatedReward(PooledReward):
    """A reward that calls a function in a helper process. Calls take turns there, so one thread is enough.

    Args:
        function: the score; it calls `isolated`, which has the deadline and scores a late call.
    """

    def __init__(self, function: ScoreFunction, isolated: Isolated, **declared: Unpack[Declared]) -> None:
        super().__init__(function, timeout_seconds=None, **declared)
        self.isolated = isolated
        self._thread: ThreadPoolExecutor | None = None

    @property
    def timeouts(self) -> int:
        return self.isolated.timeouts

    def submit(self, completion: str, sample: SampleMapping) -> Future[Score]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward")
        return self._thread.submit(self, completion, sample)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None
        self.isolated.close()


def _end(helper: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        helper.kill()
    helper.wait()
    for pipe in (helper.stdin, helper.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _serve(function: str, imports: list[str]) -> None:
    """The helper's side: read requests from stdin until it closes, answer each with a JSON line."""
    requests: BinaryIO = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the function prints must not look like an answer
    module, _, name = function.partition(":")
    try:
        for needed in imports:
            importlib.import_module(needed)
        call = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        _answer(answers, {"error": str(error)})
        return
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    sys.dont_write_bytecode = True
    try:
        sandbox_child.refuse_all_but_computing()
    except sandbox_child.Refused as error:
        _answer(answers, {"error": f"this machine cannot confine it: {error}"})
        return
    sys.addaudithook(_refuse)
    _answer(answers, {"ready": True})
    while header := requests.read(_HEADER.size):
        size, seconds = _HEADER.unpack(header)
        token, args = pickle.loads(requests.read(size))
        # If the parent dies, it cannot kill a hanging call: the kernel ends it.
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds + 1)
        reply: dict[str, object]
        try:
            reply = {"value": float(call(*args))}
        except MemoryError:
            os._exit(1)
        except Exception as error:  # the parent raises it, with the sample's id
            reply = {"error": f"{type(error).__name__}: {error}"[:2000]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        _answer(answers, {"to": token, **reply})


_REFUSED = re.compile(
    r"os\.(system|exec|fork|posix_spawn|spawn|kill|remove|rename|rmdir|mkdir|link|symlink|truncate|chmod|chown|utime|setxattr)"
    r"|(subprocess|pty|socket|ctypes|signal|shutil)\."
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _refuse(event: str, args: tuple[object, ...]) -> None:
    """Audit hook: refuses what arithmetic and puzzles never need and evaluated text must not do."""
    if _REFUSED.match(event) or (event == "open" and isinstance(args[2], int) and args[2] & _WRITING):
        raise PermissionError(f"not allowed here: {event}")


def _answer(answers: BinaryIO, reply: Mapping[str, object]) -> None:
    answers.write(json.dumps(reply).encode() + b"\n")
    answers.flush()


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2:])
