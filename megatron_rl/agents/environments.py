"""Environments of the agent `tools`: what answers the model's calls, and says in the end what the conversation was worth."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from megatron_rl.agents.mcp_tools import McpTools
from megatron_rl.agents.python_tool import PythonTool
from megatron_rl.agents.registry import Verdict
from megatron_rl.base.messages import errors_named, unknown_name
from megatron_rl.base.plugins import load_function
from megatron_rl.base.typed_params import Params, check_arguments
from megatron_rl.data.sample import Message
from megatron_rl.tasks.tool_house import ToolHouse

ToolSchemas: TypeAlias = Sequence[Mapping[str, object]]


class Environment(Protocol):
    """One conversation's. Methods may be coroutines; those that are not run in threads, so they may wait for others.

    An attribute `inline = True` says that they only compute, or have deadlines of their own: they then run where the
    conversations do, without a thread and without a deadline. A method `close`, where there is one, is called in the end,
    however the conversation ended; what it raises is dropped.
    """

    def reset(self, task: Mapping[str, object]) -> ToolSchemas | Awaitable[ToolSchemas]:
        """Begins; returns the tools in OpenAI's form, as the task's prompt has them."""
        ...

    def call(self, name: str, arguments: Mapping[str, object]) -> str | Awaitable[str]:
        """A tool's reply to the model. What it raises is a reply, too."""
        ...

    def reward(self, task: Mapping[str, object], messages: Sequence[Message]) -> Verdict | Awaitable[Verdict]:
        """Called after the last turn; returns one number, or one by column; a list in the place of a number has one per turn
        of the model. `messages`: the whole conversation."""
        ...


ENVIRONMENTS: dict[str, Callable[..., Environment]] = {"mcp": McpTools, "python": PythonTool, "tool_house": ToolHouse}


def environment_maker(name: str, params: Params) -> Callable[[], Environment]:
    """Makes environments of a name of `ENVIRONMENTS`, or the user's own: `path/to/file.py:factory`, `package.module:factory`.

    Raises:
        ValueError: an unknown name or parameter (naming the nearest), or one that the environment refuses.
    """
    factory = load_function(name, "environment") if ":" in name else ENVIRONMENTS.get(name)
    if factory is None:
        known = unknown_name("environment", name, ENVIRONMENTS)
        raise ValueError(f"{known} (an environment of your own is written module:factory)")
    check_arguments(factory, params, name)
    with errors_named(name):
        made = factory(**params)  # its own refusals come before the run
    lacking = [method for method in ("reset", "call", "reward") if not callable(getattr(made, method, None))]
    if lacking:
        raise ValueError(f"the environment {name!r} has no method {lacking[0]!r}")
    return lambda: factory(**params)
