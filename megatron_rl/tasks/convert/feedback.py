"""RLHF: collections of prompts, and preference pairs as they are published."""

from __future__ import annotations

from megatron_rl.sample import Message
from megatron_rl.tasks.convert.dialogue import Dropped
from megatron_rl.tasks.files import Row, prune


def prompt_rows(row: Row) -> list[Row | Dropped]:
    """`context_messages` (OpenRLHF's and RLHFlow's prompt collections), `messages` or `prompt`: a chat that the user has the
    last word in, or text."""
    found = next((row[key] for key in ("context_messages", "messages", "prompt") if row.get(key)), None)
    if isinstance(found, str) and found.strip():
        return [{"prompt": [Message(role="user", content=found)]}]
    turns = _turns(found)
    if not turns:
        return [Dropped("no prompt")]
    if turns[-1]["role"] == "assistant":
        return [Dropped("the last message is the assistant's")]
    return [{"prompt": turns}]


def preference_rows(row: Row) -> list[Row | Dropped]:
    """`chosen` and `rejected`, whole conversations (Skywork-Reward-Preference, UltraFeedback, preference_700K): the messages
    that they share become the prompt."""
    chosen, rejected = _turns(row.get("chosen")), _turns(row.get("rejected"))
    if not chosen or not rejected:
        return [Dropped("no chat messages in chosen and rejected")]
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if shared == len(chosen) or shared == len(rejected):
        return [Dropped("chosen and rejected are the same, or one ends where the other goes on")]
    if not shared:
        return [Dropped("chosen and rejected share no prompt")]
    return [{"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}]


def _turns(value: object) -> list[Message]:
    """Chat messages; [] where it is none."""
    if not isinstance(value, list) or not all(isinstance(turn, dict) and "role" in turn for turn in value):
        return []
    return [Message(prune(turn)) for turn in value]
