"""Maths and code datasets: GSM8K, DAPO-Math-17k, DeepScaleR, Eurus-2-RL."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeGuard

from megatron_rl.tasks.columns import column
from megatron_rl.tasks.convert.dialogue import Dropped
from megatron_rl.tasks.files import Row

# DAPO's prompts say, around the problem, how the answer is to be written; a recipe's `prompt` says that here.
_DAPO = re.compile(
    r"\ASolve the following math problem[^\n]*\n\n(.+?)\n\nRemember to put your answer[^\n]*\Z", re.DOTALL
)


def gsm8k_rows(row: Row) -> Iterator[Row | Dropped]:
    """`question`, and `answer`, whose last line is `#### N`; the working goes to the metadata."""
    question, solution = row.get("question"), row.get("answer")
    if not _is_text(question) or not _is_text(solution):
        yield Dropped("no question or answer")
        return
    working, found, answer = solution.rpartition("####")
    answer = answer.strip().replace(",", "")
    if not found or not answer:
        yield Dropped("no final answer after ####")
        return
    yield {"prompt": question.strip(), "answer": answer, "metadata": {"solution": working.strip()}}


def dapo_rows(row: Row) -> Iterator[Row | Dropped]:
    """`prompt` (one user message) and `reward_model.ground_truth`; what DAPO wrote around the problem is taken off."""
    messages, answer = row.get("prompt"), column(row, "reward_model.ground_truth")
    said = messages[0].get("content") if isinstance(messages, list) and [*map(type, messages)] == [dict] else None
    if not _is_text(said):
        yield Dropped("not one user message")
        return
    if not _is_text(answer):
        yield Dropped("no ground truth")
        return
    said = said.strip()
    match = _DAPO.match(said)
    yield {"prompt": match[1].strip() if match else said, "answer": answer.strip(), "metadata": _index(row)}


def deepscaler_rows(row: Row) -> Iterator[Row | Dropped]:
    """`problem`, `answer`, `solution`."""
    problem, answer = row.get("problem"), row.get("answer")
    if not _is_text(problem) or answer is None or not str(answer).strip():
        yield Dropped("no problem or answer")
        return
    yield {
        "prompt": problem.strip(),
        "answer": str(answer).strip(),
        "metadata": {"solution": row["solution"]} if row.get("solution") else {},
    }


def eurus_rows(row: Row, ability: str) -> Iterator[Row | Dropped]:
    """`prompt` (messages), `ability` (math or code), `reward_model.ground_truth`: the answer, or the tests as JSON text."""
    messages, answer = row.get("prompt"), column(row, "reward_model.ground_truth")
    if row.get("ability") != ability:
        yield Dropped(f"its ability is {row.get('ability')}, not {ability}")
    elif not isinstance(messages, list) or not messages:
        yield Dropped("no prompt")
    elif not _is_text(answer):
        yield Dropped("no ground truth")
    else:
        metadata = {"data_source": row.get("data_source")} | _index(row)
        yield {"prompt": messages, "answer": answer.strip(), "metadata": metadata}


def _index(row: Row) -> dict[str, object]:
    index = column(row, "extra_info.index")
    return {} if index is None else {"index": index}


def _is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and bool(value.strip())
