"""Maths and code datasets: GSM8K, DAPO-Math-17k, DeepScaleR, Eurus-2-RL."""

from __future__ import annotations

import re
from typing import TypeGuard

from megatron_rl.tasks.row_mapping import column
from megatron_rl.tasks.rows import Row
from public_data.dialogue import Dropped

# DAPO's prompts tell, around the problem, how to write the answer; here a recipe's `prompt` does that.
_DAPO = re.compile(
    r"\ASolve the following math problem[^\n]*\n\n(.+?)\n\nRemember to put your answer[^\n]*\Z", re.DOTALL
)


def gsm8k_rows(row: Row) -> list[Row | Dropped]:
    """`question`, and `answer`, whose last line is `#### N`; the working goes to the metadata."""
    question, solution = row.get("question"), row.get("answer")
    if not _is_text(question) or not _is_text(solution):
        return [Dropped("no question or answer")]
    working, found, answer = solution.rpartition("####")
    answer = answer.strip().replace(",", "")
    if not found or not answer:
        return [Dropped("no final answer after ####")]
    return [{"prompt": question.strip(), "answer": answer, "metadata": {"solution": working.strip()}}]


def dapo_rows(row: Row) -> list[Row | Dropped]:
    """`prompt` (one user message) and `reward_model.ground_truth`; the instructions around the problem are removed."""
    messages, answer = row.get("prompt"), column(row, "reward_model.ground_truth")
    said = messages[0].get("content") if isinstance(messages, list) and [*map(type, messages)] == [dict] else None
    if not _is_text(said):
        return [Dropped("not one user message")]
    if not _is_text(answer):
        return [Dropped("no ground truth")]
    said = said.strip()
    match = _DAPO.match(said)
    return [{"prompt": match[1].strip() if match else said, "answer": answer.strip(), "metadata": _index(row)}]


def deepscaler_rows(row: Row) -> list[Row | Dropped]:
    """`problem`, `answer`, `solution`."""
    problem, answer = row.get("problem"), row.get("answer")
    if not _is_text(problem) or answer is None or not str(answer).strip():
        return [Dropped("no problem or answer")]
    metadata = {"solution": row["solution"]} if row.get("solution") else {}
    return [{"prompt": problem.strip(), "answer": str(answer).strip(), "metadata": metadata}]


def eurus_rows(row: Row, ability: str) -> list[Row | Dropped]:
    """`prompt` (messages), `ability` (math or code), `reward_model.ground_truth`: the answer, or the tests as JSON text."""
    messages, answer = row.get("prompt"), column(row, "reward_model.ground_truth")
    if row.get("ability") != ability:
        return [Dropped(f"its ability is {row.get('ability')}, not {ability}")]
    if not isinstance(messages, list) or not messages:
        return [Dropped("no prompt")]
    if not _is_text(answer):
        return [Dropped("no ground truth")]
    metadata = {"data_source": row.get("data_source")} | _index(row)
    return [{"prompt": messages, "answer": answer.strip(), "metadata": metadata}]


def _index(row: Row) -> dict[str, object]:
    index = column(row, "extra_info.index")
    return {} if index is None else {"index": index}


def _is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and bool(value.strip())
