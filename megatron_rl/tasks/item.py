"""What every source yields: one raw item, before templates and tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Item:
    prompt: str | list[dict[str, Any]]  # text, or chat messages
    answer: Any = None
    tool_calls: list[dict[str, Any]] | None = None
    needs_response: bool | None = None
    tools: list[dict[str, Any]] | None = None  # JSON schemas for the chat template
    metadata: dict[str, Any] = field(default_factory=dict)
