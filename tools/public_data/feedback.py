"""RLHF: collections of prompts, preference pairs as they are published, and Arena-Hard's questions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megatron_rl.data.sample import Message
from megatron_rl.tasks.rows import Row, prune, read_jsonl
from public_data.dialogue import Dropped


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


def arena_hard_rows(row: Row, answers: Mapping[str, str], category: str | None) -> list[Row | Dropped]:
    """A question with the baseline's answer. Version 2.0 has `uid`, `prompt`, `category`; 0.1 `question_id`, `turns`."""
    if category is not None and row.get("category") != category:
        return [Dropped(f"its category is {row.get('category')}, not {category}")]
    question = row.get("prompt") or _content(row.get("turns"), 0)
    answer = answers.get(_identity(row))
    if not isinstance(question, str) or not question:
        return [Dropped("no question")]
    if answer is None:
        return [Dropped("the baseline has no answer to it")]
    return [{"prompt": [Message(role="user", content=question)], "metadata": {"baseline": answer}}]


def baseline_answers(path: str | None) -> dict[str, str]:
    """Answers by question, of a file of model answers as Arena-Hard has them (v2.0: `messages`; v0.1: `choices`).

    Raises:
        ValueError: no path, no such file, or a row without an answer.
    """
    if path is None:
        raise ValueError("arena_hard needs --baseline FILE, the baseline model's answers")
    answers = {}
    for number, row in read_jsonl(Path(path)):
        choices = row.get("choices")
        turns = choices[0].get("turns") if isinstance(choices, list) and choices else None
        said = _content(row.get("messages"), -1) if turns is None else _content(turns, 0)
        text = said.get("answer") if isinstance(said, dict) else said
        if not isinstance(text, str):
            raise ValueError(f"{path}, line {number}: no answer in `messages` or `choices`")
        answers[_identity(row)] = text
    return answers


def _identity(row: Row) -> str:
    return str(row.get("uid") or row.get("question_id"))


def _content(turns: object, index: int) -> object:
    turn = turns[index] if isinstance(turns, list) and turns else None
    return turn.get("content") if isinstance(turn, dict) else None


def _turns(value: object) -> list[Message]:
    """Chat messages; [] where it is none."""
    if not isinstance(value, list) or not all(isinstance(turn, dict) and "role" in turn for turn in value):
        return []
    return [Message(prune(turn)) for turn in value]
