"""Reading tool calls from a completion, and whether it has the fields it should, in the formats that models are taught to
write.

- `toolrl`: one `<tool_call>` block, in it one `{"name": ..., "parameters": {...}}` per line (ToolRL's prompt).
- `hermes`: one `<tool_call>` block per call, in it `{"name": ..., "arguments": {...}}` (Qwen's chat templates).
- `llama`: `{"name": ..., "parameters": {...}}` as the message, after `<|python_tag|>` or not; several one after the other,
  with `;` or white space between, or as a list (the chat templates of Llama 3.1 to 3.3).
- `mistral`, `glm4`, `qwen3_5`, `deepseek`, `gpt_oss`: see `template_calls`.

A parser returns the calls, [] where the completion does not try to call a tool, and None where its calls cannot be read. It
never raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Literal

from megatron_rl.data.sample import Call, SampleMapping
from megatron_rl.rewards.call_json import as_call, load_json
from megatron_rl.rewards.template_calls import (
    Apart,
    Tools,
    deepseek_apart,
    glm4_apart,
    gpt_oss_apart,
    mistral_apart,
    qwen3_5_apart,
    typed,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, THOUGHT = "<think>", "</think>"
PYTHON_TAG = "<|python_tag|>"
_END_TAGS = ("<|eom_id|>", "<|eot_id|>")
_STARTS_CALL = re.compile(r"\{|\[\s*\{")
_BETWEEN = re.compile(r"[\s;]*")


def json_lines(text: str) -> list[str]:
    """A text's lines. Unlike `str.splitlines`, none ends at U+2028 and its like, which JSON allows within a string."""
    return re.split(r"[\r\n]+", text)


def after_thinking(completion: str) -> str:
    """The text after the last `</think>`; the whole text without one."""
    return completion.rpartition(THOUGHT)[2]


def parse_tool_calls(completion: str) -> list[Call] | None:
    """The calls in the first `<tool_call>` block, one JSON object per line; None where they cannot be read.

    Every call needs a `name` (text) and `parameters` (object). An empty block holds no calls. None means: no block, one
    that is not closed, or a line that is not such an object. Where there is a block after the last `</think>`, tags in
    the thinking are ignored (the released code fails on them).
    """
    said = after_thinking(completion)
    _, opened, rest = (said if OPEN in said else completion).partition(OPEN)
    block, closed, _ = rest.partition(CLOSE)
    if not (opened and closed):
        return None
    calls = []
    for line in json_lines(block):
        if not line.strip():
            continue
        call = as_call(load_json(line))
        if call is None:
            return None
        calls.append(call)
    return calls


def toolrl_calls(completion: str) -> list[Call] | None:
    """`parse_tool_calls`; [] where only the thinking has the tags: a block there is no call."""
    head, closed, said = completion.partition(THOUGHT)
    before, opened, _ = head.partition(THINK)
    outside = (before if opened else "") + said if closed else completion
    return parse_tool_calls(completion) if OPEN in outside or CLOSE in outside else []


def hermes_calls(completion: str) -> list[Call] | None:
    """One call per block after the thinking. None for a block that is not closed or holds anything but one call."""
    pieces = after_thinking(completion).split(OPEN)
    if CLOSE in pieces[0]:
        return None
    calls = []
    for piece in pieces[1:]:
        block, closed, rest = piece.partition(CLOSE)
        call = as_call(load_json(block), ("arguments", "parameters")) if closed and CLOSE not in rest else None
        if call is None:
            return None
        calls.append(call)
    return calls


def calls_apart(content: str) -> tuple[str, str]:
    """A Llama message's text and its calls, either of which may be empty.

    The calls are what follows `<|python_tag|>`. That is a special token: where completions are decoded without those, a
    message that begins with an object, or a list of them, is calls.
    """
    content = content.rstrip()
    while content.endswith(_END_TAGS):
        content = content[: content.rindex("<")].rstrip()
    text, tagged, called = content.partition(PYTHON_TAG)
    if not tagged and _STARTS_CALL.match(content.lstrip()):
        return "", content
    return text, called


def llama_calls(completion: str) -> list[Call] | None:
    """The calls of `calls_apart`, one after the other or in lists."""
    said = after_thinking(completion)
    text = calls_apart(said)[1].lstrip()
    if not text:
        return None if PYTHON_TAG in said else []
    calls: list[Call] = []
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        for item in value if isinstance(value, list) else [value]:
            call = as_call(item, ("parameters", "arguments"))
            if call is None:
                return None
            calls.append(call)
        between = _BETWEEN.match(text, at)
        assert between is not None  # it may be empty
        at = between.end()
    return calls


ParserName = Literal["toolrl", "hermes", "llama", "mistral", "glm4", "qwen3_5", "deepseek", "gpt_oss"]
APART: dict[ParserName, Callable[[str], Apart]] = {
    "mistral": mistral_apart,
    "glm4": glm4_apart,
    "qwen3_5": qwen3_5_apart,
    "deepseek": deepseek_apart,
    "gpt_oss": gpt_oss_apart,
}
_UNTYPED: tuple[ParserName, ...] = ("glm4", "qwen3_5")
PARSERS: dict[ParserName, Callable[[str], list[Call] | None]] = {
    "toolrl": toolrl_calls,
    "hermes": hermes_calls,
    "llama": llama_calls,
}


def read_calls(completion: str, parser: ParserName, tools: Tools | None = None) -> list[Call] | None:
    """The calls of a completion; None where they cannot be read.

    Args:
        tools: of the prompt. Their schemas say which arguments are text where the format does not: `glm4`, `qwen3_5`.
    """
    if parser in PARSERS:
        return PARSERS[parser](completion)
    _, calls = APART[parser](after_thinking(completion))
    return [typed(call, tools) for call in calls] if calls and parser in _UNTYPED else calls


def calls_of_sample(completion: str, parser: ParserName, sample: SampleMapping) -> list[Call] | None:
    """`read_calls` with the tools of a sample's prompt."""
    tools = sample.get("metadata", {}).get("tools")
    return read_calls(completion, parser, tools if isinstance(tools, list) else None)


Thinking = Literal["required", "opened", "none"]
_RESPONSE = ("<response>", "</response>")

# (completion, calls wanted, response wanted, think, strict) -> has those fields and nothing else
Format = Callable[[str, bool, bool, str, bool], bool]


@cache
def _toolrl_pattern(calls: bool, response: bool, think: str, strict: bool) -> re.Pattern[str]:
    """Pattern of the whole completion. Strict: newlines exactly as in ToolRL's prompt."""
    fields = {"required": ["<think>.*?</think>"], "opened": [".*?</think>"], "none": []}[think]
    if calls:
        fields.append(r"<tool_call>\n.*?\n</tool_call>" if strict else "<tool_call>.*?</tool_call>")
    if response:
        fields.append("<response>.*?</response>")
    return re.compile((r"\n" if strict else r"\s*").join(fields), re.DOTALL)


def toolrl_format(completion: str, calls: bool, response: bool, think: str, strict: bool) -> bool:
    for wanted, tags in ((calls, (OPEN, CLOSE)), (response, _RESPONSE)):
        if wanted and any(completion.count(tag) != 1 for tag in tags):
            return False
    return _toolrl_pattern(calls, response, think, strict).fullmatch(completion.strip()) is not None


def _behind_thinking(completion: str, think: str) -> str | None:
    """The text after the thinking; None where the thinking is missing or in the wrong place."""
    text = completion.strip()
    if think != "none":
        thought, closed, text = text.partition(THOUGHT)
        required = think == "required"
        if not closed or thought.count(THINK) != required or thought.startswith(THINK) != required:
            return None
    return None if THINK in text or THOUGHT in text else text


def hermes_format(completion: str, calls: bool, response: bool, think: str, strict: bool) -> bool:
    said = _behind_thinking(completion, think)
    if said is None:
        return False
    text, *blocks = said.split(OPEN)
    for block in blocks:
        _, closed, after = block.partition(CLOSE)
        if not closed or after.strip():
            return False
    return bool(text.strip()) == response and bool(blocks) == calls and CLOSE not in text


def llama_format(completion: str, calls: bool, response: bool, think: str, strict: bool) -> bool:
    said = _behind_thinking(completion, think)
    if said is None:
        return False
    text, called = calls_apart(said)
    return bool(text.strip()) == response and bool(called.strip()) == calls


def _template_format(apart: Callable[[str], Apart]) -> Format:
    def has_format(completion: str, calls: bool, response: bool, think: str, strict: bool) -> bool:
        said = _behind_thinking(completion, think)
        if said is None:
            return False
        text, called = apart(said)
        return called is not None and bool(text.strip()) == response and bool(called) == calls

    return has_format


FORMATS: dict[ParserName, Format] = {
    "toolrl": toolrl_format,
    "hermes": hermes_format,
    "llama": llama_format,
    **{name: _template_format(apart) for name, apart in APART.items()},
}
