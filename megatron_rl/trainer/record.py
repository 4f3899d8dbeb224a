"""Recorded rollouts: `<run_dir>/rollouts/step_<n>.npz`, one step's rewards, advantages and log-probs as plain arrays.

`tools/compare_estimators.py` reads them; so can anything that reads NumPy. A file takes 12 bytes per trained token and 8 per
rollout and reward, uncompressed; texts are in `samples/`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from megatron_rl.algorithms import StepEstimate
from megatron_rl.data import RewardTable
from megatron_rl.trainer.minibatch import Minibatch

TOKEN_ARRAYS = ("log_probs", "old_log_probs", "rollout_log_probs")


@dataclass
class TokenLog:
    """Log-probs of this rank's share of the trained rollouts: row of the training batch -> name -> float32 [tokens]."""

    rows: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)

    def add(self, minibatch: Minibatch) -> None:
        """Takes `TOKEN_ARRAYS` of a minibatch's tokens, cut at the rollouts' ends."""
        for micro, known in zip(minibatch.micro_batches, minibatch.tokens, strict=True):
            if not micro.rows:
                continue
            sizes = torch.bincount(micro.sequence_ids, minlength=len(micro.rows)).tolist()
            cuts = np.cumsum(sizes)[:-1]
            parts = {name: np.split(getattr(known, name).float().cpu().numpy(), cuts) for name in TOKEN_ARRAYS}
            for local, row in enumerate(micro.rows):
                self.rows[row] = {name: parts[name][local] for name in TOKEN_ARRAYS}


@dataclass
class RecordedStep:
    """The content of a file. n prompts, m rollouts each, k rewards; r rollouts that were trained on."""

    table: RewardTable  # the step's rewards, with weights, lengths and (ReMax) the greedy rollout's
    truncated: torch.Tensor  # bool [n, m], rollouts cut at the token limit
    advantages: torch.Tensor  # float64 [n, m], as the run used them
    rows: torch.Tensor  # int64 [r], i * m + j of each trained rollout; a rollout without tokens is not among them
    offsets: torch.Tensor  # int64 [r + 1], where each one's tokens start in the arrays below; the last is their number
    log_probs: (
        torch.Tensor
    )  # float32 [tokens], of the policy when it was last updated on this rollout, before that update
    old_log_probs: torch.Tensor  # float32 [tokens], of the policy before the step's first update
    rollout_log_probs: torch.Tensor  # float32 [tokens], the engine's
    clip_range: tuple[float, float] | None  # the estimator's (eps_low, eps_high), or None

    @property
    def sequence_ids(self) -> torch.Tensor:
        """int64 [tokens]: index into `rows`."""
        return torch.repeat_interleave(torch.arange(len(self.rows)), self.offsets.diff())


def write_step(
    path: Path,
    sample_ids: Sequence[str],
    table: RewardTable,
    truncated: torch.Tensor,
    estimate: StepEstimate,
    tokens: Sequence[Mapping[int, Mapping[str, np.ndarray]]],
) -> None:
    """Writes one step, complete or not at all.
    `tokens`: `TokenLog.rows` of every rank; keys are positions among the rollouts with `estimate.train`.
    """
    trained = np.flatnonzero(estimate.train.flatten().numpy())
    merged: dict[int, Mapping[str, np.ndarray]] = {}
    for part in tokens:
        merged.update(part)
    rows = sorted(merged)
    lengths = [len(merged[row]["log_probs"]) for row in rows]
    arrays: dict[str, np.ndarray] = {
        "samples": np.array(sample_ids),
        "names": np.array(table.names),
        "weights": np.array([table.weight(name) for name in table.names]),
        "rewards": table.values.numpy(),
        "valid": table.mask.numpy(),
        "truncated": truncated.numpy(),
        "advantages": estimate.advantages.numpy(),
        "rows": trained[rows],
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "clip_range": np.array(estimate.clip_range or ()),
    }
    for name in TOKEN_ARRAYS:
        empty = [np.zeros(0, dtype=np.float32)]
        arrays[name] = np.concatenate([merged[row][name] for row in rows] or empty).astype(np.float32)
    if table.lengths is not None:
        arrays["lengths"] = table.lengths.numpy()
    if table.greedy is not None:
        arrays["greedy"] = table.greedy.numpy()
    if table.scored is not None:
        arrays["scored"] = table.scored.numpy()
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    os.replace(temporary, path)


def read_step(path: str | Path) -> RecordedStep:
    """Reads a file that `write_step` wrote. ValueError if it is something else."""
    with np.load(path, allow_pickle=False) as stored:
        missing = {"rewards", "names", "offsets", *TOKEN_ARRAYS} - set(stored.files)
        if missing:
            raise ValueError(f"{path} is not a recorded step: it lacks {', '.join(sorted(missing))}")
        arrays = {name: stored[name] for name in stored.files}
    names = tuple(str(name) for name in arrays["names"])
    tensors = {name: torch.from_numpy(arrays[name]) for name in arrays if arrays[name].dtype.kind in "fbi"}
    clip_range = arrays["clip_range"].tolist()
    return RecordedStep(
        table=RewardTable(
            tensors["rewards"],
            names,
            tensors["valid"],
            dict(zip(names, arrays["weights"].tolist(), strict=True)),
            tensors.get("lengths"),
            tensors.get("greedy"),
            tensors.get("scored"),
        ),
        truncated=tensors["truncated"],
        advantages=tensors["advantages"],
        rows=tensors["rows"],
        offsets=tensors["offsets"],
        log_probs=tensors["log_probs"],
        old_log_probs=tensors["old_log_probs"],
        rollout_log_probs=tensors["rollout_log_probs"],
        clip_range=(clip_range[0], clip_range[1]) if clip_range else None,
    )


def recorded_steps(run_dir: str | Path) -> dict[int, Path]:
    """Step -> file, in order, of everything that a run has recorded."""
    found = {int(path.stem.removeprefix("step_")): path for path in Path(run_dir).glob("rollouts/step_*.npz")}
    return dict(sorted(found.items()))
