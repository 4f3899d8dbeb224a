"""A dialogue with tools, and the decisions in it: K assistant turns become K instances, each with the turns before it.

AWPO, section 4.1. Two styles of prompt: `toolrl`, ToolRL's (tools and the tags to write in a system message, the dialogue so
far as tagged text in one user message), and `chat`, messages and tool schemas for the model's own chat template.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_rl.data.sample import Call, Message
from megatron_rl.rewards.tool_parsers import toolrl_calls
from megatron_rl.tasks.rows import Row
from megatron_rl.tasks.tool_world import function_schema, toolrl_response

STYLES = ("toolrl", "chat")


@dataclass(frozen=True)
class Dropped:
    """A row or turn that was left out, with the reason; conversions count the reasons."""

    reason: str


@dataclass(frozen=True)
class Turn:
    """One turn. An assistant's has calls, text, or both; a tool's has its results as text."""

    role: str  # user | assistant | tool
    text: str | None = None
    calls: list[Call] = field(default_factory=list)
    thought: str | None = None  # assistant: its reasoning, where the source has it


@dataclass(frozen=True)
class ToolSchema:
    name: str
    description: str
    parameters: dict[str, object]  # name -> {"type", "description", ...}
    required: tuple[str, ...] = ()

    def schema(self) -> dict[str, object]:
        return function_schema(self.name, self.description, self.parameters, self.required)


@dataclass(frozen=True)
class Dialogue:
    tools: list[ToolSchema]
    turns: list[Turn]


SYSTEM = """You are an assistant that may call tools. Use them where they help, and answer the user.

**Available Tools**
{tools}

**Each Turn**
First think, inside <think> and </think>. Then call tools, or answer the user, or do both:

<think> your reasoning </think>
<tool_call>
{{"name": "a tool's name", "parameters": {{"a parameter's name": "its value"}}}}
</tool_call>
<response> your answer </response>

Inside <tool_call> every line is one call, a JSON object with "name" and "parameters" ({{}} where there are none). Leave out
<tool_call> or <response> where you do not need it. The dialogue so far follows; <obs> holds what tools returned."""


def decisions(dialogue: Dialogue, style: str, system: str = SYSTEM) -> Iterator[Row | Dropped]:
    """One row per assistant turn: `prompt`, `tool_calls`, `needs_response`, `answer`, and a demonstration.

    Args:
        dialogue: K assistant turns; K rows or reasons come out, in order.
        style: `toolrl` or `chat`.
        system: toolrl: the system message, `str.format` with the field `tools`.
    """
    listed = {tool.name for tool in dialogue.tools}
    step = 0
    for place, turn in enumerate(dialogue.turns):
        if turn.role != "assistant":
            continue
        step += 1
        before = dialogue.turns[:place]
        if not before:
            yield Dropped("the assistant speaks first")
        elif any(call["name"] not in listed for call in turn.calls):
            yield Dropped("calls a tool that is not listed")
        elif not turn.calls and not (turn.text or "").strip():
            yield Dropped("neither calls nor a response")
        else:
            yield _row(dialogue, before, turn, step, style, system)


def _row(dialogue: Dialogue, before: list[Turn], turn: Turn, step: int, style: str, system: str) -> Row | Dropped:
    answer = turn.text.strip() if turn.text and turn.text.strip() else None
    target = toolrl_response(f" {turn.thought or ''} ".replace("  ", " "), turn.calls, answer and f" {answer} ")
    if toolrl_calls(target) != turn.calls:  # a tag or a line break where JSON has none
        return Dropped("its calls cannot be written with tags")
    row: Row = {
        "tool_calls": turn.calls,
        "needs_response": answer is not None,
        "answer": answer,
        "metadata": {"step": step} | ({"rationale": turn.thought} if turn.thought else {}),
    }
    if style == "toolrl":
        prompt = [
            {"role": "system", "content": system.format(tools=tool_list(dialogue.tools))},
            {"role": "user", "content": history(before)},
        ]
        return {"prompt": prompt, **row, "demonstration": target}
    return {"prompt": [_message(turn) for turn in before], "tools": [tool.schema() for tool in dialogue.tools], **row}


def tool_list(tools: list[ToolSchema]) -> str:
    """The tools as ToolRL's prompt lists them."""
    lines = []
    for number, tool in enumerate(tools, 1):
        parameters = json.dumps(tool.parameters, ensure_ascii=False)
        lines.append(f"{number}. Name: {tool.name}\nDescription: {tool.description}\nParameters: {parameters}")
    return "\n".join(lines)


def history(turns: list[Turn]) -> str:
    """The dialogue so far as ToolRL's tagged text."""
    parts = []
    for turn in turns:
        if turn.role == "user":
            parts.append(f"<user> {turn.text} </user>")
        elif turn.role == "tool":
            parts[-1] += f"\n<obs> {turn.text} </obs>" if parts else f"<obs> {turn.text} </obs>"
        else:
            lines = [f"<think> {turn.thought} </think>"] if turn.thought else []
            if turn.calls:
                calls = "\n".join(json.dumps(call, ensure_ascii=False) for call in turn.calls)
                lines.append(f"<tool_call>\n{calls}\n</tool_call>")
            if turn.text:
                lines.append(f"<response> {turn.text} </response>")
            parts.append("\n".join(lines))
    return "**Dialogue Records History**\n" + "\n\n".join(parts)


def _message(turn: Turn) -> Message:
    message: Message = {"role": turn.role, "content": turn.text or ""}
    if turn.calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": call["name"], "arguments": call["parameters"]}}
            for call in turn.calls
        ]
    return message
