"""A chat server that misbehaves on demand: HTTP by hand, so that it can break every rule of it. Counts what it receives."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

Behave = Callable[[int, dict[str, Any]], str]  # number of the request and its body -> what to do


def completion(text: str | None, tokens: tuple[int, int] = (100, 7)) -> bytes:
    usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage}).encode()


class ChatServer:
    """Do `score:<x>`, `text:<reply>`, `raw:<body>`, `status:<code>[:<retry-after>]`, `drop`, `half`, `trickle`, `hang`,
    `garbage`, `json` or `together:<n>` (1.0 to all, once n are waiting).

    Attributes:
        requests: (path, body, headers) of every request read to its end.
        done: how often each action was taken.
        most_open: most requests that were being answered at a time.
    """

    def __init__(self, behave: Behave, work_seconds: float = 0.0) -> None:
        self.behave, self.work_seconds = behave, work_seconds
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.done: Counter[str] = Counter()
        self.most_open = self._open = 0
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        async def start() -> None:
            server = await asyncio.start_server(self._connection, "127.0.0.1", 0, backlog=1024)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
            self._ready.set()

        self._loop.create_task(start())
        self._loop.run_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._request(reader, writer):
                pass
        writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Reads and answers one; whether the connection stays open."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        line, *rest = head.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in rest)}
        if not line.startswith("POST"):  # somebody looks whether there is a server
            writer.write(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n")
            return True
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        number = len(self.requests)
        self.requests.append((line.split()[1], body, headers))
        action = self.behave(number, body)
        self.done[action.partition(":")[0]] += 1
        self._open += 1
        self.most_open = max(self.most_open, self._open)
        try:
            return await self._act(action, reader, writer)
        finally:
            self._open -= 1

    async def _act(self, action: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        kind, _, rest = action.partition(":")
        if kind == "drop":
            return False
        if kind == "hang":
            await asyncio.sleep(3600)
        await asyncio.sleep(self.work_seconds)
        if kind == "garbage":
            writer.write(b"\x00\x01 this is not HTTP \xff\xff\r\n\r\n")
            return False
        if kind == "half":  # promises more than it sends, then ends its side and keeps the socket
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{")
            writer.write_eof()
            await asyncio.sleep(3600)
        if kind == "trickle":  # a byte now and then, for ever
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            while True:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.05)
        if kind == "together":
            while self.most_open < int(rest):
                await asyncio.sleep(0.01)
            kind, rest = "score", "1.0"
        status, extra = "200 OK", ""
        content = b"[1, 2" if kind == "json" else completion(rest)
        if kind == "raw":
            content = rest.encode()
        if kind == "score":
            content = completion(f'{{"score": {rest}}}')
        if kind == "status":
            code, _, after = rest.partition(":")
            status, extra, content = f"{code} No", f"Retry-After: {after}\r\n" if after else "", b'{"error": "no"}'
        writer.write(f"HTTP/1.1 {status}\r\n{extra}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        await writer.drain()
        return True

    def __enter__(self) -> ChatServer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        def stop() -> None:
            for task in asyncio.all_tasks():
                task.cancel()
            self._loop.call_soon(self._loop.stop)

        self._loop.call_soon_threadsafe(stop)
        self._thread.join(10)


@contextlib.contextmanager
def serving(behave: Behave | str, work_seconds: float = 0.0) -> Iterator[ChatServer]:
    with ChatServer((lambda *_: behave) if isinstance(behave, str) else behave, work_seconds) as server:
        yield server
