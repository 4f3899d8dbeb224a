"""The agent `tools`: the model talks, its calls are made, their replies go back to it, until it calls nothing."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from megatron_rl.agents.environments import Environment, environment_maker
from megatron_rl.agents.failures import InfrastructureFailed, ModelFailed
from megatron_rl.agents.registry import Agent, AgentTask, Verdict, register_agent
from megatron_rl.base.typed_params import Params, Positive
from megatron_rl.data.sample import Message
from megatron_rl.rewards.code import Count
from megatron_rl.runtime.calls import CallTimeout, waiting_pool

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_WITHOUT_TURN_REWARDS = ("mcp", "python")


@register_agent("tools")
def tools(
    environment: str,
    environment_params: Params | None = None,
    tool_seconds: Positive = 30.0,
    longest_reply: Count = 4000,
) -> Agent:
    """Gives the model the tools of an environment, and makes the calls that it writes, one after the other.

    The conversation ends with the first turn without calls, or at the task's limits; the environment then says what it was
    worth. A tool that raises replies with its error, and one that takes too long ends its conversation, which has the reward
    `model_failed`.

    Args:
        environment: a registered one (`tool_house`), or your own: `path/to/file.py:factory`, `package.module:factory`.
        environment_params: the environment's parameters.
        tool_seconds: deadline of every call.
        longest_reply: characters of a reply that the model sees; the rest is left out, with a word that it is.
    """
    make = environment_maker(environment, environment_params or {})

    async def run(model: AsyncOpenAI, task: AgentTask) -> Verdict:
        house = make()
        call = functools.partial(_do, house, tool_seconds)
        try:
            return await _converse(model, task, house, call)
        finally:
            if callable(close := getattr(house, "close", None)):
                with contextlib.suppress(Exception):
                    await call(close)

    async def _converse(model: AsyncOpenAI, task: AgentTask, house: Environment, call: Callable[..., Any]) -> Verdict:
        try:
            schemas = await call(house.reset, task)
        except CallTimeout:
            raise InfrastructureFailed(f"{environment} took more than {tool_seconds:g} s to begin") from None
        offered: dict[str, Any] = {"tools": [*schemas]} if schemas else {}
        messages: list[Any] = [*cast(list[Message], task["prompt"])]
        while True:
            answer = await model.chat.completions.create(model="policy", messages=messages, **offered)
            message = answer.choices[0].message
            messages.append(message.to_dict())
            if not message.tool_calls:
                return cast(Verdict, await call(house.reward, task, messages))
            for tool_call in message.tool_calls:
                assert tool_call.type == "function"  # the session makes no others
                name, arguments = tool_call.function.name, json.loads(tool_call.function.arguments)
                reply = functools.partial(
                    _reply, functools.partial(call, house.call, name, arguments), name, tool_seconds
                )
                # Made again after a kill, for the environment is a new one and has to come to where it was.
                text = await task.recorded([messages, tool_call.id], reply, again=True)
                messages.append({"role": "tool", "tool_call_id": tool_call.id, "content": cut(text, longest_reply)})

    return Agent(run, rewards_turns=environment not in _WITHOUT_TURN_REWARDS)


async def _do(environment: Environment, seconds: float, method: Callable[..., Any], *arguments: object) -> Any:
    """A method's result. CallTimeout where it is late; an environment that is `inline` has no deadline."""
    inline = getattr(environment, "inline", False)
    if inspect.iscoroutinefunction(method):
        if inline:
            return await method(*arguments)
        try:
            async with asyncio.timeout(seconds) as deadline:
                return await method(*arguments)
        except TimeoutError:
            if deadline.expired():
                raise CallTimeout from None
            raise
    if inline:
        return method(*arguments)
    return await asyncio.wrap_future(waiting_pool().submit(functools.partial(method, *arguments), seconds))


async def _reply(call: Callable[[], Any], name: str, seconds: float) -> str:
    try:
        return str(await call())
    except CallTimeout:
        raise ModelFailed(f"the tool {name} took more than {seconds:g} s") from None
    except (ModelFailed, InfrastructureFailed):
        raise
    except Exception as error:  # whatever a tool raises is the model's to read
        return f"error: {error}" if str(error) else f"error: {type(error).__name__}"


def cut(text: str, longest: int) -> str:
    """Text that every tokenizer takes: surrogates, which UTF-8 has not, are replaced."""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= longest else f"{text[:longest]} ... {len(text) - longest} more characters"
