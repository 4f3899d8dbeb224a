"""The environment `mcp` of the agent `tools`: the tools of a server that speaks the Model Context Protocol."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_rl.agents.failures import InfrastructureFailed
from megatron_rl.data.sample import Message

if TYPE_CHECKING:
    from megatron_rl.agents.mcp_client import Connection


@dataclass(frozen=True)
class McpServer:
    """Which server.

    Attributes:
        command: to start it; None: it is at `url`.
        environment: variables of the command's.
        api_key_env: the variable with the URL's bearer token.
    """

    command: tuple[str, ...] | None
    environment: tuple[tuple[str, str], ...]
    url: str | None
    api_key_env: str | None

    def __str__(self) -> str:
        return f"the MCP server {self.url or ' '.join(self.command or ())}"


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
        own = tuple(sorted((environment or {}).items()))
        self._server = McpServer(None if command is None else tuple(command), own, url, api_key_env)
        self._shared, self._only = shared, None if only is None else tuple(only)
        self._connection: Connection | None = None

    async def reset(self, task: Mapping[str, object]) -> list[Mapping[str, object]]:
        client: Any = await asyncio.to_thread(
            importlib.import_module, "megatron_rl.agents.mcp_client"
        )  # takes a second
        self._connection = (client.shared if self._shared else client.Connection)(self._server)
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
