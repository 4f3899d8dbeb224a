"""The forms in which clients ask for a turn: each a pure translation to and from the session's own messages."""

from __future__ import annotations

from megatron_rl.agents.dialects import anthropic_messages, chat_completions, responses, token_generation
from megatron_rl.agents.dialects.asking import MODEL, Asked, Dialect

DIALECTS: dict[str, Dialect] = {
    "v1/chat/completions": chat_completions.DIALECT,
    "v1/responses": responses.DIALECT,
    "v1/messages": anthropic_messages.DIALECT,
    "inference/v1/generate": token_generation.DIALECT,
}
"""By the path behind a session's address."""

__all__ = ["DIALECTS", "MODEL", "Asked", "Dialect"]
