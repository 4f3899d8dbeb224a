"""A program in an environment of its own that plays a part of conversations, shared by all conversations of an engine.

`guests/` has the programs, and `guests/pipe.py` what is said over their standard input and output.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from megatron_rl.agents.failures import InfrastructureFailed
from megatron_rl.runtime.process import variables_for_another_python

ENVIRONMENTS = Path(__file__).resolve().parents[2] / ".venv-agents"
_LONGEST = 2**26  # bytes of a line
_LAST_LINES = 12  # of what it wrote to its standard error, in errors
_LEAVE = 5.0  # seconds that a guest has to leave, `guests/pipe.py` too
_GUESTS: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Future[Guest]]] = WeakKeyDictionary()


def interpreter(name: str) -> Path:
    """The Python of an environment below `.venv-agents`.

    Raises:
        ValueError: it has not been made.
    """
    python = ENVIRONMENTS / name / "bin" / "python"
    if not (python.parent.parent / ".installed").exists():
        raise ValueError(f"its environment {python.parent.parent} has not been made; run `make agents-setup`")
    return python


async def the_guest(command: tuple[str, ...], params: Mapping[str, object]) -> Guest:
    """The running guest of this loop with these parameters; it is started where there is none, or none any more.

    Raises:
        InfrastructureFailed: it could not be started.
    """
    guests = _GUESTS.setdefault(asyncio.get_running_loop(), {})
    key = json.dumps([command, params], sort_keys=True)
    known = guests.get(key)
    if known is None or (known.done() and (known.cancelled() or known.exception() or not known.result().lives)):
        # A task of its own: the conversation that asks first may end before the guest is ready.
        known = guests[key] = asyncio.ensure_future(_started(command, params))
        known.add_done_callback(lambda start: start.cancelled() or start.exception())
    return await asyncio.shield(known)


async def _started(command: tuple[str, ...], params: Mapping[str, object]) -> Guest:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=_LONGEST,
        start_new_session=True,
        env=variables_for_another_python(),
    )
    guest = Guest(process, Path(command[-1]).name)
    guest.say(params)
    await guest.ready()
    return guest


class Guest:
    """A guest's process. All of it runs in one event loop, whose end is the guest's end.

    Args:
        process: in a process group of its own.
        name: for errors.
    """

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self._process, self._name = process, name
        self._answers: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._errors = deque[str](maxlen=_LAST_LINES)
        self._asked = 0
        self._work = [asyncio.create_task(self._listen()), asyncio.create_task(self._note_errors())]

    @property
    def lives(self) -> bool:
        return not self._work[0].done()

    async def ready(self) -> None:
        """Returns once it answers requests. InfrastructureFailed: it ended before."""
        await self._ready

    def say(self, message: Mapping[str, object]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        """Its answer to a request; it is told where that is not waited for any more.

        Raises:
            InfrastructureFailed: it answered that it failed, or it ended.
        """
        if not self.lives:
            raise self._ended()
        self._asked += 1
        name = str(self._asked)
        answer = self._answers[name] = asyncio.get_running_loop().create_future()
        self.say({"id": name, "request": {**request, "name": name}})
        try:
            return await answer
        except asyncio.CancelledError:
            self.say({"cancel": name})
            raise
        finally:
            self._answers.pop(name, None)

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                self._hear(json.loads(line))
            await asyncio.wait_for(self._process.wait(), _LEAVE)
            await asyncio.wait(self._work[1:], timeout=_LEAVE)
        finally:  # it ended or spoke nonsense, or the run ends
            self._end()
            error = self._ended()
            waiting: list[asyncio.Future[Any]] = [self._ready, *self._answers.values()]
            for future in waiting:
                if not future.done():
                    future.set_exception(error)
            self._ready.exception()  # it may be that nobody waits

    def _hear(self, line: Mapping[str, Any]) -> None:
        if line.get("ready"):
            self._ready.set_result(None)
            return
        answer = self._answers.get(line["id"])
        if answer is None or answer.done():
            return
        if "failed" in line:
            answer.set_exception(GuestFailed(f"{self._name}: {line['failed']}"))
        else:
            answer.set_result(line["done"])

    async def _note_errors(self) -> None:
        assert self._process.stderr is not None
        while line := await self._process.stderr.readline():
            self._errors.append(line.decode(errors="replace").rstrip())

    def _ended(self) -> InfrastructureFailed:
        code, last = self._process.returncode, "\n".join(self._errors)
        return InfrastructureFailed(f"{self._name} ended (code {code}); its last words:\n{last}")

    def _end(self) -> None:
        """Terminates its process group, and kills what of it still lives a while later."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        threading.Thread(
            target=_kill_later, args=(self._process.pid,), name=f"end of {self._name}", daemon=True
        ).start()


def _kill_later(group: int) -> None:
    time.sleep(_LEAVE + 1)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


class GuestFailed(Exception):
    """A conversation failed, as a guest says. Where a limit of the policy came before it, the policy failed."""
