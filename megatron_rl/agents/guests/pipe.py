"""How a guest talks with the run: JSON lines over its standard input and output.

A guest is a program in an environment of its own, which has another project's packages and not this one's. It is told
parameters, says that it is ready, and answers requests, as many at a time as come. It leaves when its input ends or it is
terminated, so it does not outlive the run, however that ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

LEAVE = 5.0  # seconds from the end of the input until its process group is killed

Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
World = Callable[[dict[str, Any]], AbstractAsyncContextManager[Answer]]


def main(world: World, export: Callable[[list[str]], None]) -> None:
    """A guest's command line: `export ...` writes prompts, nothing serves requests."""
    if sys.argv[1:2] == ["export"]:
        export(sys.argv[2:])
    else:
        speak(world)


def speak(world: World) -> None:
    """Serves requests until the input ends. `world`: from the parameters to what answers a request; it is entered once.

    What anybody prints goes to the standard error, since the output carries the answers.
    """
    answers = os.dup(1)
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, _terminated)
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(world, answers))
    _kill_group()


def _terminated(*_: object) -> None:
    threading.Thread(target=_kill_later, daemon=True).start()
    raise KeyboardInterrupt  # asyncio.run cancels what is under way


def _kill_later() -> None:
    time.sleep(LEAVE)
    _kill_group()


def _kill_group() -> None:
    """This process and all that it started, where it has a group of its own, as the run gives it one."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)


async def _serve(world: World, answers: int) -> None:
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[bytes] = asyncio.Queue()
    under_way: dict[str, asyncio.Task[None]] = {}

    def listen() -> None:  # in a thread, which hears the end whatever the loop does
        rest = b""
        while piece := os.read(0, 2**16):  # not sys.stdin, whose lock a thread must not hold when the interpreter ends
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                loop.call_soon_threadsafe(lines.put_nowait, line)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lines.put_nowait, b"")
        _kill_later()

    def say(**what: object) -> None:
        said = json.dumps(what).encode() + b"\n"
        with suppress(BrokenPipeError):  # nobody listens any more, and the input ends too
            while said:
                said = said[os.write(answers, said) :]

    async def respond(name: str, request: dict[str, Any]) -> None:
        try:
            say(id=name, done=await answer(request))
        except Exception as error:  # another project's code: whatever it raises
            say(id=name, failed=f"{type(error).__name__}: {error}")
        finally:
            del under_way[name]

    threading.Thread(target=listen, daemon=True).start()
    async with world(json.loads(await lines.get())) as answer:
        say(ready=True)
        while line := await lines.get():
            message = json.loads(line)
            if "cancel" in message:
                if (task := under_way.get(message["cancel"])) is not None:
                    task.cancel()
            else:
                name = message["id"]
                under_way[name] = asyncio.create_task(respond(name, message["request"]))
        rest = [*under_way.values()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
