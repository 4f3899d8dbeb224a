"""Connections to servers of the Model Context Protocol, by the package `mcp`, which takes a second to import.

`python -m megatron_rl.agents.mcp_client COMMAND...` (or a URL) prints a server's tools as the key `tools` of a task has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import httpx2
import mcp_types
import yaml
from mcp import Client, MCPError
from mcp.client import Transport
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage

from megatron_rl.agents.failures import InfrastructureFailed
from megatron_rl.agents.mcp_tools import McpServer, McpTools

_LONGEST_LINE = 1 << 22  # bytes of a message of a server's
_MOST_BYTES = 1 << 24  # of all that it writes between two requests
_LEAST = 1 << 12  # bytes that any message counts for there, since reading it takes time, too
_REST_SECONDS = 1.0  # for what a server that is killed has written
_MOST_PAGES = 100  # of its list of tools
_INHERITED = ("HOME", "LANG", "PATH", "TMPDIR", "USER")


class Connection:
    """A connection that a task of the event loop holds open; requests may come from any task."""

    def __init__(self, server: McpServer) -> None:
        self._server, self._ending = server, asyncio.Event()
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._listed: asyncio.Task[list[dict[str, Any]]] | None = None
        self._processes: list[asyncio.subprocess.Process] = []
        self._kill = weakref.finalize(self, _kill, self._processes)  # at the end of this process at the latest
        self.task = asyncio.create_task(self._hold(), name=str(server))

    async def tools(self) -> list[dict[str, Any]]:
        """Name, description and parameters of each tool, as OpenAI's functions have them; asked for once."""
        if self._listed is None:
            self._listed = asyncio.create_task(self._list())
        return await asyncio.shield(self._listed)

    async def call(self, name: str, arguments: Mapping[str, object]) -> str:
        """The text of a call's result.

        Raises:
            InfrastructureFailed: the connection is gone.
        """
        client = await self._ready()
        try:
            result = await self._while_open(client.call_tool(name, dict(arguments)))
        except MCPError as error:
            if error.code == mcp_types.CONNECTION_CLOSED:
                raise InfrastructureFailed(f"{self._server} ended in a call of {name}") from None
            return f"error: {error.message}"
        parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
        return ("error: " if result.is_error else "") + "\n".join(parts)

    def end(self) -> None:
        if self._client.done():
            self._ending.set()
        else:
            self.task.cancel()
        self._kill()

    async def _list(self) -> list[dict[str, Any]]:
        client, listed, cursor = await self._ready(), list[dict[str, Any]](), None
        for _ in range(_MOST_PAGES):
            page = await self._while_open(client.list_tools(cursor=cursor))
            for tool in page.tools:
                described = {} if tool.description is None else {"description": tool.description}
                listed.append({"name": tool.name, **described, "parameters": tool.input_schema})
            cursor = page.next_cursor
            if cursor is None:
                break
        return listed

    async def _ready(self) -> Client:
        return await asyncio.shield(self._client)

    async def _while_open(self, request: Any) -> Any:
        """The answer to a request. InfrastructureFailed once the connection is gone, which not every request notices."""
        asking = asyncio.ensure_future(request)
        try:
            await asyncio.wait({asking, self.task}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise InfrastructureFailed(f"{self._server} is gone")
            return asking.result()
        finally:
            if asking.cancel():
                asking.add_done_callback(_forget)

    async def _hold(self) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                client = await stack.enter_async_context(Client(await self._transport(stack), cache=None))
                self._client.set_result(client)
                await self._ending.wait()
        except Exception as error:  # of the server's making, in groups: whatever it is, its conversations hear of it
            if not self._client.done():
                said = InfrastructureFailed(f"{self._server} cannot be talked to: {_innermost(error)}")
                self._client.set_exception(said)
                self._client.exception()  # there may be nobody who waits
        finally:
            self._client.cancel()

    async def _transport(self, stack: contextlib.AsyncExitStack) -> Transport:
        server = self._server
        if server.command is not None:
            return _stdio(server.command, dict(server.environment), self._processes)
        headers = {}
        if server.api_key_env is not None:
            headers["Authorization"] = f"Bearer {os.environ[server.api_key_env]}"
        client = httpx2.AsyncClient(headers=headers, timeout=None)  # the calls have deadlines
        return streamable_http_client(str(server.url), http_client=await stack.enter_async_context(client))


_SHARED: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[McpServer, Connection]] = weakref.WeakKeyDictionary()


def shared(server: McpServer) -> Connection:
    """The connection of this event loop to a server; a new one where the last has ended."""
    known = _SHARED.setdefault(asyncio.get_running_loop(), {})
    if server not in known or known[server].task.done():
        known[server] = Connection(server)
    return known[server]


def _kill(processes: Sequence[asyncio.subprocess.Process]) -> None:
    for process in processes:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _stdio(
    command: Sequence[str], environment: Mapping[str, str], processes: list[asyncio.subprocess.Process]
) -> AbstractAsyncContextManager[Any]:
    """A transport of `mcp`'s to a server that is started, and noted among `processes`. Unlike the library's own it bounds
    what the server may write, and takes no time to end it."""

    @asynccontextmanager
    async def transport() -> AsyncIterator[Any]:
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**inherited, **environment},
            limit=_LONGEST_LINE,
            start_new_session=True,  # what it starts ends with it
        )
        processes.append(process)
        assert process.stdin is not None
        assert process.stdout is not None
        to_client, received = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        to_send, from_client = anyio.create_memory_object_stream[SessionMessage](0)
        written, requests = process.stdin, process.stdout
        room = _MOST_BYTES

        async def read() -> None:
            nonlocal room
            async with to_client:
                with contextlib.suppress(ValueError, anyio.BrokenResourceError, anyio.ClosedResourceError):
                    while line := await requests.readline():  # ValueError: longer than any message
                        room -= max(len(line), _LEAST)
                        if room < 0:
                            break
                        if (message := _message(line)) is not None:
                            await to_client.send(SessionMessage(message))
            _kill([process])
            from_client.close()  # else the client would ask again, and wait

        async def write() -> None:
            nonlocal room
            with contextlib.suppress(anyio.ClosedResourceError):
                async for message in from_client:
                    room = _MOST_BYTES
                    line = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                    written.write(line.encode() + b"\n")
                    with contextlib.suppress(ConnectionError):
                        await written.drain()

        tasks = [asyncio.create_task(read()), asyncio.create_task(write())]
        try:
            yield received, to_send
        finally:
            _kill([process])
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for stream in (received, to_send, to_client, from_client):
                stream.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REST_SECONDS):  # a program that left the group may hold the pipe
                    while await requests.read(1 << 16):  # what has its end read is closed
                        pass
                    await process.wait()

    return transport()


def _message(line: bytes) -> Any:
    """A line as a message of the protocol; None where it is something else, which servers print by mistake."""
    try:
        return mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        return None


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _forget(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()


async def _print_tools(words: Sequence[str]) -> None:
    if not words:
        raise ValueError("say which server: its command, or its URL")
    is_url = words[0].startswith(("http://", "https://"))
    tools = McpTools(url=words[0]) if is_url else McpTools(command=words)
    listed = await tools.reset({})
    await tools.close()
    print(yaml.safe_dump({"tools": listed}, sort_keys=False), end="")


if __name__ == "__main__":
    try:
        asyncio.run(_print_tools(sys.argv[1:]))
    except (ValueError, InfrastructureFailed) as error:
        sys.exit(str(error))
