"""A generated tool-calling task: a house with a few made-up tools, requests, and the calls that fulfil them.

A prompt lists some of the tools and asks for one or several things. Numbers are given as sums, so that thinking pays. Where
a request needs a tool that is not listed, no call can fulfil it and a plain answer is right.

    listed  timer(minutes:int) lamp(room:kitchen|hall|attic, on:bool)
    request wake me in 3+4-2 minutes and switch the hall on
    gold    {"name": "timer", "parameters": {"minutes": 5}}
            {"name": "lamp", "parameters": {"room": "hall", "on": true}}

Responses are written with ToolRL's tags (`megatron_rl.rewards`: `tool_format`, `tool_correctness`, `tool_exec`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_rl.config.keys import Share
from megatron_rl.data.sample import Call
from megatron_rl.tasks.row_mapping import Item


@dataclass(frozen=True)
class Parameter:
    name: str
    type: str  # int | bool | str
    phrase: str  # how a request says it, with {} for the value
    options: tuple[str, ...] = ()  # str: the values there are


@dataclass(frozen=True)
class Tool:
    name: str
    asks: str  # how a request begins
    parameters: tuple[Parameter, ...]


_ROOMS = ("kitchen", "hall", "attic")
_PEOPLE = ("ann", "bob", "eve")
_ON = Parameter("on", "bool", " {}")

TOOLS = (
    Tool(
        "timer",
        "wake me",
        (Parameter("minutes", "int", " in {} minutes"), Parameter("sound", "str", " with a {}", ("bell", "song"))),
    ),
    Tool("heat", "warm", (Parameter("degrees", "int", " to {}"), Parameter("room", "str", " in the {}", _ROOMS))),
    Tool("mail", "write", (Parameter("pages", "int", " {} pages"), Parameter("to", "str", " to {}", _PEOPLE))),
    Tool("buy", "get", (Parameter("count", "int", " {}"), Parameter("item", "str", " {}", ("milk", "rice", "tea")))),
    Tool("lamp", "switch", (Parameter("room", "str", " the {}", _ROOMS), _ON)),
    Tool("walk", "go", (Parameter("steps", "int", " {} steps"), Parameter("fast", "bool", " fast {}"))),
    Tool("call", "ring", (Parameter("who", "str", " {}", _PEOPLE), Parameter("hour", "int", " at {}"))),
    Tool("lock", "close", (Parameter("room", "str", " the {}", _ROOMS), Parameter("code", "int", " code {}"))),
)

NOT_LISTED = "cannot {ask}"  # the plain answer


@dataclass(frozen=True)
class WorldParams:
    """How hard the prompts are.

    Args:
        tools: how many tools a prompt lists.
        parameters: at most so many parameters per tool.
        min_calls, max_calls: how many things a request asks for.
        min_terms, max_terms: terms of the sum that stands for a number; 1: the number itself.
        plain: share of the prompts that need a tool which is not listed.
    """

    tools: int = 4
    parameters: int = 2
    min_calls: int = 1
    max_calls: int = 2
    min_terms: int = 1
    max_terms: int = 3
    plain: Share = 0.1

    def __post_init__(self) -> None:
        check_ranges(
            self,
            ("tools", 1, len(TOOLS)),
            ("parameters", 1, 2),
            ("min_calls", 1, self.tools),
            ("max_calls", self.min_calls, self.tools),
            ("min_terms", 1, 9),
            ("max_terms", self.min_terms, 9),
        )
        if self.plain and self.tools == len(TOOLS):
            raise ValueError(
                f"plain = {self.plain}: with all {len(TOOLS)} tools listed none is missing; set plain to 0"
            )


def check_ranges(params: object, *ranges: tuple[str, int, int]) -> None:
    """ValueError where a generator's parameter is outside its range: its name, the least and the greatest value."""
    for name, low, high in ranges:
        value = getattr(params, name)
        if not low <= value <= high:
            raise ValueError(f"{name} = {value!r}, must be a whole number from {low} to {high}")


def make_item(params: WorldParams, rng: random.Random) -> Item:
    """The prompt is the request alone. `metadata` has what a template can put around it: `names` (`timer lamp`) and
    `signatures` (`timer(minutes:int) ...`); and `rationale`, the working that leads to the calls. `tools` are the
    listed tools as JSON schemas, for a chat template."""
    listed = rng.sample(TOOLS, params.tools)
    if rng.random() < params.plain:
        wanted = rng.choice([tool for tool in TOOLS if tool not in listed])
        request, _, _ = _ask(wanted, params, rng)
        answer = NOT_LISTED.format(ask=wanted.asks)
        return _item(listed, params, request, [], f"{wanted.name} is missing", answer)
    asked = [_ask(tool, params, rng) for tool in rng.sample(listed, rng.randint(params.min_calls, params.max_calls))]
    request = " and ".join(request for request, _, _ in asked)
    rationale = " ".join(working for _, working, _ in asked)
    return _item(listed, params, request, [call for _, _, call in asked], rationale, None)


def _item(
    listed: list[Tool], params: WorldParams, request: str, calls: list[Call], rationale: str, answer: str | None
) -> Item:
    return Item(
        prompt=request,
        answer=answer,
        tool_calls=calls,
        needs_response=not calls,
        tools=[schema(tool, params.parameters) for tool in listed],
        metadata={
            "source_dataset": "tool_world",
            "names": " ".join(tool.name for tool in listed),
            "signatures": " ".join(signature(tool, params.parameters) for tool in listed),
            "rationale": rationale,
        },
    )


def _ask(tool: Tool, params: WorldParams, rng: random.Random) -> tuple[str, str, Call]:
    """A request for a tool, the working that leads to its call (the tool's name, then the steps of its sums), the call."""
    request, working = tool.asks, tool.name
    values: dict[str, object] = {}
    for parameter in tool.parameters[: params.parameters]:
        if parameter.type == "int":
            value, values[parameter.name], steps = _sum(rng, rng.randint(params.min_terms, params.max_terms))
            working = " ".join([working, *steps])
        elif parameter.type == "bool":
            values[parameter.name] = is_on = rng.random() < 0.5
            value = "on" if is_on else "off"
        else:
            values[parameter.name] = value = rng.choice(parameter.options)
        request += parameter.phrase.format(value)
    return request, working, {"name": tool.name, "parameters": values}


def _sum(rng: random.Random, terms: int) -> tuple[str, int, list[str]]:
    """A sum of one-digit terms as text, its value, and its steps from left to right."""
    total = rng.randint(1, 9)
    text, steps = str(total), []
    for _ in range(terms - 1):
        operator, term = rng.choice("+-"), rng.randint(1, 9)
        result = total + term if operator == "+" else total - term
        text += f"{operator}{term}"
        steps.append(f"{total}{operator}{term}={result}")
        total = result
    return text, total, steps


def signature(tool: Tool, count: int) -> str:
    types = ", ".join(f"{p.name}:{'|'.join(p.options) or p.type}" for p in tool.parameters[:count])
    return f"{tool.name}({types})"


def schema(tool: Tool, count: int) -> dict[str, object]:
    """The tool as chat templates take it."""
    json_type = {"int": "integer", "bool": "boolean", "str": "string"}
    properties = {
        parameter.name: {"type": json_type[parameter.type]}
        | ({"enum": list(parameter.options)} if parameter.options else {})
        for parameter in tool.parameters[:count]
    }
    return function_schema(tool.name, f"use it to {tool.asks}", properties, properties)


def function_schema(
    name: str, description: str, properties: Mapping[str, object], required: Iterable[str]
) -> dict[str, object]:
    """OpenAI's schema of a function, as chat templates take it."""
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def toolrl_response(thought: str, calls: list[Call], answer: str | None) -> str:
    """A response with ToolRL's tags and line breaks."""
    text = f"<think>{thought}</think>"
    if calls:
        lines = "\n".join(json.dumps(call, ensure_ascii=False) for call in calls)
        text += f"\n<tool_call>\n{lines}\n</tool_call>"
    return text if answer is None else f"{text}\n<response>{answer}</response>"
