"""Whether a completion has the fields it should, in the formats of `tool_parsers`."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Literal

from megatron_rl.rewards.tool_parsers import CLOSE, OPEN, THINK, THOUGHT, ParserName, calls_apart

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
    """What follows the thinking; None where the thinking is missing or in the wrong place."""
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


FORMATS: dict[ParserName, Format] = {"toolrl": toolrl_format, "hermes": hermes_format, "llama": llama_format}
