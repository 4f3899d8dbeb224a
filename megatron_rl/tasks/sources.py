"""The sources of a task: each yields raw items, before templates and tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import TaskConfig


@dataclass(slots=True)
class Item:
    """One raw item of a source."""

    prompt: str | list[dict[str, Any]]  # text, or chat messages
    answer: Any = None
    tool_calls: list[dict[str, Any]] | None = None
    needs_response: bool | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


def reasoning_gym_items(config: TaskConfig) -> Iterator[Item]:
    """Items of a reasoning-gym dataset, in its own order; a pure function of name, params, seed and size.

    `metadata` is the dataset's own, plus `question` (the original text, whatever the prompt template makes of it) and
    `source_params` (the dataset's parameters), so that the `puzzle` reward can call the dataset's verifier.
    """
    import reasoning_gym

    assert config.name is not None
    assert config.size is not None
    try:
        dataset = reasoning_gym.create_dataset(config.name, seed=config.seed, size=config.size, **config.params)
    except (AssertionError, TypeError, ValueError) as error:  # how the datasets refuse a parameter
        raise ValueError(f"reasoning_gym's {config.name} refuses params {dict(config.params)}: {error}") from error
    params = dict(config.params)
    for index in range(config.size):
        item = dataset[index]
        metadata = item["metadata"]
        metadata["source_dataset"] = config.name
        metadata["source_params"] = params
        metadata["question"] = item["question"]
        yield Item(prompt=item["question"], answer=item["answer"], metadata=metadata)


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of every non-blank line.

    Raises:
        ValueError: no such file, or a line that is not a JSON object; names file and line.
    """
    try:
        file = path.open(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    with file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error})") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: must be a JSON object, not {type(row).__name__}")
            yield number, row


def jsonl_items(config: TaskConfig) -> Iterator[Item]:
    """One item per line of a JSONL file.

    The prompt and answer columns are the config's; `tool_calls` and `needs_response` are taken from the columns of that
    name where there are any; every other column, and the keys of a `metadata` object, end up in the metadata.
    """
    assert config.path is not None
    path = Path(config.path)
    for number, row in islice(read_jsonl(path), config.size):
        where = f"{path}, line {number}"
        prompt = _prompt(row, config.prompt_key, where)
        metadata = {
            key: value
            for key, value in row.items()
            if key not in (config.prompt_key, config.answer_key, "tool_calls", "needs_response", "metadata")
        }
        extra = row.get("metadata") or {}
        if not isinstance(extra, dict):
            raise ValueError(f"{where}: the column 'metadata' must be an object, not {type(extra).__name__}")
        yield Item(
            prompt=prompt,
            answer=row.get(config.answer_key),
            tool_calls=_tool_calls(row.get("tool_calls"), where),
            needs_response=_optional_bool(row.get("needs_response"), where),
            metadata={**metadata, **extra},
        )


def _prompt(row: dict[str, Any], key: str, where: str) -> str | list[dict[str, Any]]:
    if key not in row:
        raise ValueError(f"{where}: no column {key!r} (it has {', '.join(row)}); set prompt_key to the prompt's column")
    prompt = row[key]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(turn, dict) and "role" in turn for turn in prompt):
        return prompt
    raise ValueError(f"{where}: {key!r} must be text or a list of chat messages with a role, not {prompt!r:.80}")


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]] | None:
    if calls is None:
        return None
    if not isinstance(calls, list):
        raise ValueError(f"{where}: 'tool_calls' must be a list, not {type(calls).__name__}")
    for call in calls:
        if not (
            isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("parameters"), dict)
        ):
            raise ValueError(f'{where}: a gold call must be {{"name": text, "parameters": object}}, not {call!r:.80}')
    return calls


def _optional_bool(value: Any, where: str) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    raise ValueError(f"{where}: 'needs_response' must be true or false, not {value!r}")


SOURCES: dict[str, Callable[[TaskConfig], Iterator[Item]]] = {
    "reasoning_gym": reasoning_gym_items,
    "jsonl": jsonl_items,
}
