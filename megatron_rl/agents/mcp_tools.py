"""The environment `mcp` of the agent `tools`: the tools of a server that speaks the Model Context Protocol.

`python -m megatron_rl.agents.mcp_tools COMMAND...` (or a URL) prints a server's tools as the key `tools` of a task has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import os
import shutil
import signal
import sys
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

from megatron_rl.agents.failures import InfrastructureFailed
from megatron_rl.data.sample import Message

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client import Transport

_LONGEST_LINE = 1 << 22  # bytes of a message of a server's
_MOST_BYTES = 1 << 24  # of all that it writes between two requests
_LEAST = 1 << 12  # bytes that any message counts for there, since reading it takes time, too
_REST_SECONDS = 1.0  # for what a server that is killed has written
_MOST_PAGES = 100  # of its list of tools
_INHERITED = ("HOME", "LANG", "PATH", "TMPDIR", "USER")


class McpTools:
    """The tools of an MCP server; a reply is the text of the result, and an error of the tool's is a reply, too.

    The prompts must have the tools that the server lists (the task's key `tools`, or a column). It gives no reward: other
    rewards read the conversation. A server that is not there, ends or writes nonsense is a failure of the infrastructure.

    Args:
        command: a server to start, which speaks on its standard input and output. What it writes to its error output is
            dropped.
        environment: variables of its environment, beside HOME, LANG, PATH, TMPDIR and USER.
        url: in its place, a server with the streamable HTTP transport.
        api_key_env: the environment variable that holds the URL's bearer token.
        shared: all conversations of an engine talk to one server; else each has its own, or over HTTP a session of its own.
        only: names of the tools that are offered; null: all.
    """

    def __init__(
        self,
        command: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
        url: str | None = None,
        api_key_env: str | None = None,
        shared: bool = False,
        only: Sequence[str] | None = None,
    ) -> None:
        if (command is None) == (url is None):
            raise ValueError("give either the command of a server or the url of one")
        if importlib.util.find_spec("mcp") is None:
            raise ValueError("the environment mcp needs the package mcp, which comes with vLLM")
        if command is not None:
            if not command or shutil.which(command[0]) is None:
                raise ValueError(f"command: there is no program {command[0] if command else ''!r}")
            if api_key_env is not None:
                raise ValueError("api_key_env: has no effect without url; remove it")
        else:
            if environment is not None:
                raise ValueError("environment: has no effect without command; remove it")
            if not str(url).startswith(("http://", "https://")):
                raise ValueError(f"url: {url!r} begins with neither http:// nor https://")
            if api_key_env is not None and api_key_env not in os.environ:
                raise ValueError(f"api_key_env: the environment variable {api_key_env} is not set")
        self._server = _Server(
            None if command is None else tuple(command), tuple(sorted((environment or {}).items())), url, api_key_env
        )
        self._shared, self._only = shared, None if only is None else tuple(only)
        self._connection: _Connection | None = None

    async def reset(self, task: Mapping[str, object]) -> list[Mapping[str, object]]:
        self._connection = _shared(self._server) if self._shared else _Connection(self._server)
        listed = await self._connection.tools()
        self._names = [tool["name"] for tool in listed]
        for name in self._only or ():
            if name not in self._names:
                raise InfrastructureFailed(f"{self._server} has no tool {name!r}: it has {', '.join(self._names)}")
        chosen = [tool for tool in listed if self._only is None or tool["name"] in self._only]
        self._names = [tool["name"] for tool in chosen]
        return [{"type": "function", "function": tool} for tool in chosen]

    async def call(self, name: str, arguments: Mapping[str, object]) -> str:
        assert self._connection is not None
        if name not in self._names:
            return f"error: the tools are {', '.join(self._names)}"
        return await self._connection.call(name, arguments)

    def reward(self, task: Mapping[str, object], messages: Sequence[Message]) -> None:
        return None

    async def close(self) -> None:
        if self._connection is not None and not self._shared:
            self._connection.end()


class _Server(tuple[tuple[str, ...] | None, tuple[tuple[str, str], ...], str | None, str | None]):
    """Which server: command, environment, URL, name of the variable with the key."""

    def __new__(
        cls, command: tuple[str, ...] | None, environment: tuple[tuple[str, str], ...], url: str | None, key: str | None
    ) -> _Server:
        return super().__new__(cls, (command, environment, url, key))  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"the MCP server {self[2] or ' '.join(self[0] or ())}"


class _Connection:
    """A connection that a task of the event loop holds open; requests may come from any task."""

    def __init__(self, server: _Server) -> None:
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
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        client = await self._ready()
        try:
            result = await self._while_open(client.call_tool(name, dict(arguments)))
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
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
        """What a request returns. InfrastructureFailed once the connection is gone, which not every request notices."""
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
            mcp = await asyncio.to_thread(importlib.import_module, "mcp")  # a second: others go on
            async with contextlib.AsyncExitStack() as stack:
                client = await stack.enter_async_context(mcp.Client(await self._transport(stack), cache=None))
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
        command, environment, url, key = self._server
        if command is not None:
            return _stdio(command, dict(environment), self._processes)
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        headers = {} if key is None else {"Authorization": f"Bearer {os.environ[key]}"}
        client = httpx2.AsyncClient(headers=headers, timeout=None)  # the calls have deadlines
        return streamable_http_client(str(url), http_client=await stack.enter_async_context(client))


_SHARED: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Server, _Connection]] = weakref.WeakKeyDictionary()


def _shared(server: _Server) -> _Connection:
    """The connection of this event loop to a server; a new one where the last has ended."""
    known = _SHARED.setdefault(asyncio.get_running_loop(), {})
    if server not in known or known[server].task.done():
        known[server] = _Connection(server)
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
        import anyio
        from mcp.shared.message import SessionMessage

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
    import mcp_types

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
    import yaml

    is_url = words[0].startswith(("http://", "https://"))
    tools = McpTools(url=words[0]) if is_url else McpTools(command=words)
    listed = await tools.reset({})
    await tools.close()
    print(yaml.safe_dump({"tools": listed}, sort_keys=False), end="")


if __name__ == "__main__":
    asyncio.run(_print_tools(sys.argv[1:]))
