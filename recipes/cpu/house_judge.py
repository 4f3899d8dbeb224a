"""A judge of whole conversations in a house (tool_house): how much of what was done rests on what was known.

Which room, whose friend, which code: a careful agent uses values from the request or from its tools' replies. The grade is
the share of the calls' values that had been said before the call; it says nothing of whether the request was fulfilled, and 0
where nothing was called.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def judge() -> Callable[[str, Mapping[str, Any]], float]:
    return lambda response, sample: grounded(sample["messages"])


def grounded(messages: Sequence[Mapping[str, Any]]) -> float:
    """Share of the values in tool calls that earlier messages, of others than the model, have as a word; in [0, 1]."""
    said, values = set[str](), list[bool]()
    for message in messages:
        if message["role"] != "assistant":
            said.update(re.findall(r"\w+", str(message["content"])))
        for call in message.get("tool_calls") or ():
            arguments = json.loads(call["function"]["arguments"])
            values += [str(value) in said for value in arguments.values()] if isinstance(arguments, dict) else [False]
    return sum(values) / len(values) if values else 0.0
