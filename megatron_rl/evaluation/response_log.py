"""Responses of a running evaluation on disk, so that an interrupted one continues.

`<run_dir>/responses/` has `origin.json`, what the responses depend on apart from their prompts, and a file of JSON lines per
engine. Every response has its own seed, so those still to be drawn do not depend on those that exist.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np

from megatron_rl.agents.registry import agent_tasks, sources_of
from megatron_rl.config.schema import Config, TaskConfig
from megatron_rl.data.rollout import Rollout, Segment
from megatron_rl.data.sample import Sample
from megatron_rl.runtime import disk, provenance
from megatron_rl.tasks.tokenizing import template_params

FOLDER = "responses"
Kept = dict[tuple[str, int], Rollout]  # by sample id and index


def origin(config: Config, model: Mapping[str, object]) -> dict[str, object]:
    """Everything that the responses depend on apart from their prompts. `model` identifies the model, in JSON values."""
    trainer, rollout = config.trainer, config.rollout
    agents = {key: _conversations(task) for key, task in agent_tasks(config).items()}
    known = {
        "model": dict(model),
        "dtype": config.model.dtype,
        "rollout.tensor_parallel": rollout.tensor_parallel,
        "rollout.expert_parallel": rollout.expert_parallel,
        "rollout.fp8": [rollout.fp8, *rollout.fp8_skip],
        "rollout.max_tokens": rollout.max_tokens,
        "trainer.eval_temperature": trainer.eval_temperature,
        "trainer.eval_top_p": trainer.eval_top_p,
        "seed": config.seed,
        "versions": provenance.versions(),
        **({"agents": agents} if agents else {}),
    }
    return cast(dict[str, object], json.loads(json.dumps(known, default=str)))  # as `differences` reads it


def _conversations(task: TaskConfig) -> dict[str, object]:
    """Describes what a task's conversations depend on: the agent but for when it is given up, its files, and the template."""
    assert task.agent is not None
    agent = {key: value for key, value in asdict(task.agent).items() if key not in ("seconds", "stop_after")}
    return {**agent, "code": sources_of(task.agent), "chat_params": template_params(task)}


def files_of(folder: Path) -> dict[str, list[int]]:
    """Size in bytes and modification time in ns of every file below a model's folder, to recognise the model."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): [path.stat().st_size, path.stat().st_mtime_ns] for path in paths}


def differences(folder: Path, now: Mapping[str, object]) -> list[str] | None:
    """Keys of `now` that differ from the evaluation that left responses in `folder`; None where `folder` has none."""
    try:
        then = json.loads((folder / "origin.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:  # killed while it was written, before the first response
        return ["origin.json"]
    return sorted(key for key in {*now, *then} if now.get(key) != then.get(key))


def read(folder: Path, samples: Sequence[Sample]) -> Kept:
    """The responses to these prompts; those to others, and a killed process's last line, are skipped."""
    by_id = {sample.id: sample for sample in samples}
    logged: Kept = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            sample = by_id.get(row["sample"])
            if sample is not None and row["prompt"] == _digest(sample.prompt_ids):
                logged[sample.id, row["rollout"]] = _rollout(sample, row)
    return logged


def begin(folder: Path, now: Mapping[str, object]) -> None:
    """Writes `origin.json` where it is missing."""
    folder.mkdir(exist_ok=True)
    if not (folder / "origin.json").exists():
        disk.replace(folder / "origin.json", json.dumps(now, indent=1) + "\n")


class Keeper:
    """Appends responses to one file. Call it from one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        if self._file.tell():
            self._file.write("\n")  # after a killed process's last line

    def __call__(self, rollout: Rollout) -> None:
        """Conversations that were lost are left out: an evaluation that goes on begins them again."""
        if rollout.failed_by == "infrastructure":
            return
        row: dict[str, object] = {
            "sample": rollout.sample_id,
            "rollout": rollout.index,
            "prompt": _digest(rollout.prompt_ids.tolist()),
            **(_conversation(rollout) if rollout.is_conversation else {"response_ids": rollout.response_ids.tolist()}),
            "finish_reason": rollout.finish_reason,
        }
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def discard(folder: Path) -> None:
    """The evaluation is complete: its responses are in `samples/`."""
    shutil.rmtree(folder, ignore_errors=True)


def _conversation(rollout: Rollout) -> dict[str, object]:
    return {
        "segments": [
            [segment.ids.tolist(), segment.logprobs is not None, segment.begins_sequence]
            for segment in rollout.segments[1:]
        ],
        "messages": rollout.messages,
        "conversations": rollout.conversations,
        "last_turn": rollout.last_turn,
        "agent_rewards": {name: None if math.isnan(value) else value for name, value in rollout.agent_rewards.items()},
        "turn_rewards": dict(rollout.turn_rewards),
        "failed_by": rollout.failed_by,
    }


def _rollout(sample: Sample, row: Mapping[str, Any]) -> Rollout:
    """The rollout that a row tells of, without log-probs, which an evaluation does not read."""
    index, ending = row["rollout"], row["finish_reason"]
    if "segments" not in row:
        return Rollout.single_turn(sample, index, row["response_ids"], ending)
    segments = [Segment(np.asarray(sample.prompt_ids, dtype=np.int64))]
    for ids, drawn, begins_sequence in row["segments"]:
        unknown = np.full(len(ids), np.nan, dtype=np.float32) if drawn else None
        segments.append(Segment(np.asarray(ids, dtype=np.int64), unknown, begins_sequence=begins_sequence))
    rewards = {name: math.nan if value is None else value for name, value in row["agent_rewards"].items()}
    return Rollout(
        sample.id,
        index,
        segments,
        ending,
        messages=row["messages"],
        conversations=row["conversations"],
        last_turn=row["last_turn"],
        agent_rewards=rewards,
        turn_rewards={name: tuple(values) for name, values in row.get("turn_rewards", {}).items()},
        failed_by=row["failed_by"],
    )


def _digest(tokens: Sequence[int]) -> str:
    return hashlib.blake2b(json.dumps(list(map(int, tokens))).encode(), digest_size=8).hexdigest()
