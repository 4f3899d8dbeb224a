"""One item of a source, before templates and tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_rl.images import Source
from megatron_rl.sample import Call, Prompt


@dataclass(slots=True)
class Item:
    prompt: Prompt  # text, or chat messages
    answer: object = None
    tool_calls: list[Call] | None = None
    needs_response: bool | None = None
    tools: list[dict[str, object]] | None = None  # JSON schemas for the chat template
    metadata: dict[str, object] = field(default_factory=dict)
    images: tuple[Source, ...] = ()
