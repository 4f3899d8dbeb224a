"""Recorded texts: of one step, all that rewards read, so that they can be computed again without model, data and agents.

`<run_dir>/rollouts/step_<n>.texts/<e>.jsonl` has the rollouts of engine e, each prompt before its group: of a response its
text, of a conversation all its messages and what its agent returned. Rewards themselves are in `step_<n>.npz`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.data import exact_json
from megatron_rl.data.rollout import Rollout, Rollouts
from megatron_rl.data.sample import Sample
from megatron_rl.runtime import disk
from megatron_rl.runtime.distributed import ProcessGrid

_KNOWN = ("prompt", "answer", "tool_calls", "needs_response", "metadata")  # of a sample


@dataclass(frozen=True)
class RecordedText:
    """A rollout as rewards read it.

    Attributes:
        row: prompt x group size + its number in the group, as everywhere.
        sample: with the rollout's messages and what its agent returned; without the prompt's tokens.
        left_out: keys of the sample's metadata that are no JSON, and not there.
    """

    row: int
    index: int
    sample: Sample
    text: str
    finish_reason: str
    length: int  # sampled tokens
    failed_by: str | None
    left_out: tuple[str, ...]


def folder_of(step: Path) -> Path:
    """The folder of texts of a recorded step, `step_<n>.npz`."""
    return step.with_suffix(".texts")


def write_texts(step: Path, grid: ProcessGrid, rollouts: Rollouts) -> None:
    """Writes what this rank's engine drew, complete or not at all; the first rank of each engine does."""
    if not grid.engine.is_leader:
        return
    path = folder_of(step) / f"{grid.engine.index}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with disk.text_file(temporary) as file:
        known = ""
        for row, rollout in sorted(rollouts.held.items()):
            sample = rollouts.sample(row)
            if sample.id != known:
                known = sample.id
                file.write(json.dumps(_of_sample(sample)) + "\n")
            file.write(json.dumps(_of_rollout(row, rollout)) + "\n")
    os.replace(temporary, path)


def _of_sample(sample: Sample) -> dict[str, object]:
    known: dict[str, object] = {"sample": sample.id, "task": sample.task, "agent": sample.agent}
    left_out = []
    for key in _KNOWN:
        try:
            known[key] = exact_json.to_json(getattr(sample, key))
        except TypeError:
            left_out.append(key)
    if "metadata" in left_out:
        left_out.remove("metadata")
        known["metadata"] = {}
        for key, value in sample.metadata.items():
            try:
                known["metadata"] |= {key: exact_json.to_json(value)}  # type: ignore[operator]
            except TypeError:
                left_out.append(f"metadata.{key}")
    return known | ({"left_out": left_out} if left_out else {})


def _of_rollout(row: int, rollout: Rollout) -> dict[str, object]:
    facts: dict[str, object] = {"row": row, "rollout": rollout.index, "text": rollout.text}
    facts |= {"finish_reason": rollout.finish_reason, "length": rollout.length}
    if rollout.is_conversation:
        rewards = exact_json.to_json(dict(rollout.agent_rewards))
        facts |= {"messages": exact_json.to_json(rollout.messages), "agent_rewards": rewards}
        facts |= {"failed_by": rollout.failed_by}
        if rollout.turn_rewards:
            facts["turn_rewards"] = exact_json.to_json(dict(rollout.turn_rewards))
    return facts


def read_texts(step: Path) -> Iterator[RecordedText]:
    """Yields a step's rollouts, engine by engine.

    Raises:
        ValueError: a file is damaged; names file and line.
    """
    for path in sorted(folder_of(step).glob("*.jsonl")):
        sample, left_out = Sample("", "", "", []), tuple[str, ...]()
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    known: dict[str, Any] = json.loads(line)
                    if "sample" in known:
                        sample, left_out = _read_sample(known), tuple(known.get("left_out", ()))
                    else:
                        yield _read_rollout(known, sample, left_out)
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise ValueError(f"{path}, line {number} is damaged: {type(error).__name__}: {error}") from None


def _read_sample(known: dict[str, Any]) -> Sample:
    values = {key: exact_json.from_json(known[key]) for key in _KNOWN if key in known}
    return Sample(known["sample"], known["task"], prompt_ids=[], agent=known["agent"], **({"prompt": ""} | values))


def _read_rollout(known: dict[str, Any], sample: Sample, left_out: tuple[str, ...]) -> RecordedText:
    if "messages" in known:
        rewards = exact_json.from_json(known["agent_rewards"])
        sample = replace(sample, messages=exact_json.from_json(known["messages"]), agent_rewards=rewards)
    facts = known["row"], known["rollout"], sample, known["text"], known["finish_reason"], known["length"]
    return RecordedText(*facts, known.get("failed_by"), left_out)
