"""Environments with Gymnasium's interface, `reset` and `step`: in threads, in processes of another Python, or served.

`prompts` makes the prompts of a task of their first observations; the agent `gymnasium` (`megatron_rl.agents.gymnasium_loop`)
plays on from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import random
import selectors
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.base import shipped
from megatron_rl.base.messages import errors_named
from megatron_rl.base.plugins import load_function
from megatron_rl.base.typed_params import Params, Positive, check_params
from megatron_rl.config.schema import TaskConfig
from megatron_rl.rewards.score_checks import place_of
from megatron_rl.runtime.calls import CallTimeout, event_loop, waiting_pool
from megatron_rl.runtime.process import variables_for_another_python
from megatron_rl.tasks import reset_step_worker
from megatron_rl.tasks.openenv import Served
from megatron_rl.tasks.reset_step_worker import Step, begun, stepped
from megatron_rl.tasks.row_mapping import Item

OPENENV = "openenv"
_MOST_BYTES = 1 << 22  # of an answer of a process


class EnvironmentFailed(RuntimeError):
    """An environment raised, answered nonsense or nothing in time, or its process or server is gone."""


class Game(Protocol):
    """An environment while one conversation goes on in it.

    Raises:
        EnvironmentFailed: from each method but `close`.
    """

    async def reset(self, seed: int) -> str:
        """Begins; returns the first observation."""
        ...

    async def step(self, action: str) -> Step: ...

    async def close(self) -> None:
        """Ends the game, after its last step or after one that was given up."""
        ...


@dataclass(frozen=True)
class EnvironmentParams:
    """Which environment, and where it runs.

    Args:
        environment: a class with Gymnasium's `reset(seed=...)` and `step(action)`, whose actions are text:
            `path/to/file.py:factory`, `package.module:factory`; or `openenv`, a server with OpenEnv's protocol.
        environment_params: the factory's parameters; of `openenv`: `url`, `action` (the field of an action that takes the
            text; `message`), `observation` (the field that is shown; null: all of them, as JSON) and `reset` (what a reset
            is told beside its seed).
        python: an interpreter, of an environment of its own, in whose processes the environment runs, one per
            conversation, kept for the next; null: it runs in threads of this process.
        step_seconds: deadline of every call.
    """

    environment: str
    environment_params: Params = field(default_factory=dict)
    python: str | None = None
    step_seconds: Positive = 30.0


def environment_params(params: Params) -> EnvironmentParams:
    """ValueError on an unknown parameter (naming the nearest), or an environment that cannot be made here."""
    check_params(EnvironmentParams, params, "gymnasium")
    if "environment" not in params:
        raise ValueError("gymnasium: the parameter 'environment' is missing")
    made = EnvironmentParams(**params)
    game_maker(made)
    return made


def game_maker(params: EnvironmentParams) -> Callable[[], Game]:
    """Makes games of an environment.

    Raises:
        ValueError: there is no such environment or interpreter, or a parameter is refused.
    """
    name, factory_params, seconds = params.environment, params.environment_params, params.step_seconds
    if name == OPENENV:
        if params.python is not None:
            raise ValueError("python: has no effect on a server; remove it")
        check_params(Served, factory_params, OPENENV)
        if "url" not in factory_params:
            raise ValueError(f"{OPENENV}: the parameter 'url' is missing")
        with errors_named(OPENENV):
            Served(**factory_params)
        return lambda: _Deadlines(Served(**factory_params), seconds)
    if ":" not in name:
        raise ValueError(
            f"the environment {name!r} is neither {OPENENV!r} nor written file.py:factory or module:factory"
        )
    if params.python is not None:
        return functools.partial(_InThreads, _Workers(params.python, name, factory_params, seconds).take, None)
    factory = load_function(name, "environment")
    check_params(factory, factory_params, name)
    with errors_named(name, ValueError, TypeError):
        made = factory(**factory_params)
    for method in ("reset", "step"):
        if not callable(getattr(made, method, None)):
            raise ValueError(f"the environment {name!r} has no method {method!r}")
    return functools.partial(_InThreads, functools.partial(factory, **factory_params), seconds)


def prompts(config: TaskConfig) -> Iterator[Item]:
    """Item i is the first observation of the environment with a seed that is a function of the task's seed and i."""
    params = environment_params(config.params)
    make = game_maker(params)
    assert config.size is not None
    game = make()

    def wait(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, event_loop()).result()

    try:
        for index in range(config.size):
            seed = random.Random(f"gymnasium, seed {config.seed}, item {index}").getrandbits(31)
            with errors_named("", EnvironmentFailed):
                observation = wait(game.reset(seed))
            yield Item(prompt=observation, metadata={"source_dataset": "gymnasium", "seed": seed})
    finally:
        wait(game.close())


# ------------------------------------------------------------------------------------------------------------- in threads
class _InThreads:
    """Calls of an object, each in a thread. `seconds`: the deadline of each; None: the object has its own."""

    def __init__(self, make: Callable[[], Any], seconds: float | None) -> None:
        self._make, self._seconds = make, seconds
        self._environment: Any = None

    async def reset(self, seed: int) -> str:
        if self._environment is None:
            self._environment = await self._call("making it", self._make)
        return await self._call("reset", functools.partial(begun, self._environment, seed))

    async def step(self, action: str) -> Step:
        return await self._call("step", functools.partial(stepped, self._environment, action))

    async def close(self) -> None:
        if callable(close := getattr(self._environment, "close", None)):
            waiting_pool().submit(close, self._seconds)  # nobody waits for it

    async def _call[T](self, what: str, function: Callable[[], T]) -> T:
        try:
            return await asyncio.wrap_future(waiting_pool().submit(function, self._seconds))
        except CallTimeout:
            raise EnvironmentFailed(f"{what}: no answer within {self._seconds:g} s") from None
        except EnvironmentFailed:
            raise
        except Exception as error:  # a user's code: whatever it raises
            raise EnvironmentFailed(f"{what}: {type(error).__name__}: {error}{place_of(error)}") from None


# ----------------------------------------------------------------------------------------------------------- in processes
class _Workers:
    """Processes of an interpreter, each with one environment at a time.

    Raises:
        ValueError: there is no such interpreter or file.
    """

    def __init__(self, python: str, name: str, params: Params, seconds: float) -> None:
        path = Path(python).expanduser()
        if not (path.is_file() and os.access(path, os.X_OK)):
            raise ValueError(
                f"python: {python!r} is no program; name the interpreter of an environment, .../bin/python"
            )
        module, _, attribute = name.rpartition(":")
        if module.endswith(".py"):
            found = shipped.find_file(Path(module).expanduser()).resolve()
            if not found.is_file():
                raise ValueError(f"the environment {name!r}: there is no file {module}")
            name = f"{found}:{attribute}"
        self._python, self._name, self._params, self.seconds = str(path), name, params, seconds
        self._idle: list[_Process] = []
        self._lock = threading.Lock()

    def take(self) -> _Remote:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        process = process or _Process(self._python)
        remote = _Remote(process, self)
        remote.ask({"do": "make", "name": self._name, "params": dict(self._params)})
        return remote

    def give_back(self, process: _Process) -> None:
        with self._lock:
            self._idle.append(process)


class _Remote:
    """The environment in a process, as an object with Gymnasium's interface."""

    def __init__(self, process: _Process, workers: _Workers) -> None:
        self._process, self._workers = process, workers

    def reset(self, *, seed: int) -> tuple[str, None]:
        return str(self.ask({"do": "reset", "seed": seed})["observation"]), None

    def step(self, action: str) -> tuple[str, float, bool, bool, None]:
        said = self.ask({"do": "step", "action": action})
        return said["observation"], said["reward"], said["ended"], False, None

    def close(self) -> None:
        """Waits for a call that is under way, which its caller has given up."""
        with contextlib.suppress(EnvironmentFailed):
            self.ask({"do": "close"})
            self._workers.give_back(self._process)

    def ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        answer = self._process.ask(request, self._workers.seconds)
        if "error" in answer:
            raise EnvironmentFailed(f"{request['do']}: {answer['error']}")
        return answer


class _Process:
    """A process of `reset_step_worker`. It is killed where it is late or says something else than an answer."""

    def __init__(self, python: str) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [python, reset_step_worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=variables_for_another_python(),
            start_new_session=True,  # a Ctrl-C in the terminal is the trainer's to handle; and what it starts ends with it
        )
        weakref.finalize(self, _end, self._process)

    def ask(self, request: Mapping[str, object], seconds: float) -> dict[str, Any]:
        with self._lock:
            line = b""
            with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended, or was ended here
                assert self._process.stdin is not None
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
                line = self._line(seconds)
            try:
                answer = json.loads(line)
            except ValueError:
                how = f"no answer within {seconds:g} s" if not line and self._process.poll() is None else "no answer"
                if (code := self._process.poll()) is not None:
                    how = f"its process ended with code {code}"
                elif line:
                    how = f"its process wrote {line[:40]!r}..., no answer"
                _end(self._process)
                raise EnvironmentFailed(f"{request['do']}: {how}") from None
        return dict(answer)

    def _line(self, seconds: float) -> bytes:
        """A line; what has come of it at the deadline, at the end, or where it is too long."""
        assert self._process.stdout is not None
        line, deadline = bytearray(), time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n") and len(line) <= _MOST_BYTES:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    break
                if not (chunk := os.read(self._process.stdout.fileno(), 1 << 16)):
                    self._process.wait(seconds)
                    break
                line += chunk
        return bytes(line)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


# ----------------------------------------------------------------------------------------------------------------- served
class _Deadlines:
    """A served environment, whose calls have a deadline and raise what a game's do."""

    def __init__(self, served: Served, seconds: float) -> None:
        self._served, self._seconds = served, seconds

    async def reset(self, seed: int) -> str:
        return await self._call("reset", self._served.reset(seed))

    async def step(self, action: str) -> Step:
        return await self._call("step", self._served.step(action))

    async def close(self) -> None:
        with contextlib.suppress(EnvironmentFailed):
            await self._call("close", self._served.close())

    async def _call[T](self, what: str, coroutine: Any) -> T:
        try:
            async with asyncio.timeout(self._seconds):
                return await coroutine
        except TimeoutError:
            raise EnvironmentFailed(f"{what}: no answer within {self._seconds:g} s") from None
        except ValueError as error:
            raise EnvironmentFailed(f"{what}: {error}") from None
        except OSError as error:
            raise EnvironmentFailed(f"{what}: {type(error).__name__}: {error}") from None
