"""A harness of verifiers: its own chat loop with a task's tools (`null`), in the worker's process.

`null` starts a program per turn of a user, in an environment that uv makes from the network.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.runtimes import ProgramResult, Runtime

_ARGUMENTS: ContextVar[argparse.Namespace] = ContextVar("arguments")
_PROGRAM: Any = ModuleType("chat_program")  # what `null` has uv run
exec(compile(CHAT_PROGRAM_SOURCE, "chat_program.py", "exec"), _PROGRAM.__dict__)
_parse = _PROGRAM.parse_args
_PROGRAM.parse_args = _ARGUMENTS.get


class InProcess(NullHarness):
    """`null` without its process."""

    async def setup(self, runtime: Runtime) -> None:
        pass

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        arguments = {
            "base-url": endpoint,
            "api-key": secret,
            "model": ctx.model,
            "tool-interception-url": tool_interception_url,
            "system-prompt": system,
            "mcp-config": json.dumps({"mcpServers": servers}) if servers else None,
            "prompt": prompt if isinstance(prompt, str) else None,
        }
        if prompt is not None and not isinstance(prompt, str):
            path = runtime.workdir / f"messages-{trace.id}.json"
            path.write_text(json.dumps([message_to_wire(message) for message in prompt]))
            arguments["initial-messages-file"] = str(path)
        _ARGUMENTS.set(_parsed([f"--{name}={value}" for name, value in arguments.items() if value is not None]))
        try:
            await _PROGRAM.main()
        except Exception:  # as the program's, which ends with its traceback
            return ProgramResult(1, "", traceback.format_exc())
        return ProgramResult(0, "", "")


def _parsed(arguments: list[str]) -> argparse.Namespace:
    ours, sys.argv = sys.argv, [sys.argv[0], *arguments]
    try:
        return _parse()
    finally:
        sys.argv = ours


__all__ = ["InProcess"]
