"""Recorded rollouts: one step's rewards, advantages and log-probs as plain arrays.

`<run_dir>/rollouts/step_<n>.npz` has 8 bytes per rollout and reward, `step_<n>.tokens/<r>.npz` 16 bytes per token that
data-parallel replica r was trained on. `read_step` puts them together; anything that reads NumPy reads them one by one. Texts
are beside them (`record_texts`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from megatron_rl.algorithms import StepAdvantages
from megatron_rl.data.rewards import RewardTable, TurnRewards
from megatron_rl.data.rollout import Rollouts
from megatron_rl.runtime.arrays import read_arrays
from megatron_rl.runtime.distributed import ProcessGrid
from megatron_rl.trainer.minibatch import Minibatch, trained_rows

_STEP = re.compile(r"step_(\d+)\.npz")
TOKEN_ARRAYS = ("log_probs", "old_log_probs", "rollout_log_probs")
_WRITTEN = (*TOKEN_ARRAYS, "gradient_weights")  # the last for the report only
_BY_TOKEN = "advantages"  # of steps in which tokens of a rollout had different ones
_TURN_REWARDS = "turn_rewards/"  # and the column


@dataclass
class TokenLog:
    """Arrays of this rank's share of the trained rollouts: row of the training batch -> name -> float32 [tokens]."""

    rows: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)

    def add(self, minibatch: Minibatch, by_token: bool = False) -> None:
        """Takes the arrays of a minibatch's tokens, cut at the rollouts' ends; `by_token`: with their advantages."""
        names = (*_WRITTEN, _BY_TOKEN) if by_token else _WRITTEN
        for micro, known in zip(minibatch.micro_batches, minibatch.tokens, strict=True):
            if not micro.rows:
                continue
            sizes = torch.bincount(micro.sequence_ids, minlength=len(micro.rows)).tolist()
            cuts = np.cumsum(sizes)[:-1]
            parts = {name: np.split(getattr(known, name).float().cpu().numpy(), cuts) for name in names}
            for local, row in enumerate(micro.rows):
                self.rows[row] = {name: parts[name][local] for name in names}


@dataclass
class RecordedStep:
    """The content of a file. n prompts, m rollouts each, k rewards; r rollouts that were trained on."""

    table: RewardTable  # the step's rewards, with weights, lengths and (ReMax) the greedy rollout's
    truncated: torch.Tensor  # bool [n, m], rollouts cut at the token limit
    advantages: torch.Tensor  # float64 [n, m], as the run used them
    rows: torch.Tensor  # int64 [r], i * m + j of each trained rollout; a rollout without tokens is not among them
    offsets: torch.Tensor  # int64 [r + 1], where each one's tokens start in the arrays below; the last is their number
    # float32 [tokens], of the policy when it was last updated on this rollout, before that update
    log_probs: torch.Tensor
    old_log_probs: torch.Tensor  # float32 [tokens], of the policy before the step's first update
    rollout_log_probs: torch.Tensor  # float32 [tokens], the engine's
    clip_range: tuple[float, float] | None  # the estimator's (eps_low, eps_high), or None
    token_advantages: torch.Tensor | None = None  # float32 [tokens]; None: all tokens of a rollout had its advantage
    turn_advantages: torch.Tensor | None = None  # float64 [n, m, T], where each turn had one

    @property
    def sequence_ids(self) -> torch.Tensor:
        """int64 [tokens]: index into `rows`."""
        return torch.repeat_interleave(torch.arange(len(self.rows)), self.offsets.diff())


def record_step(
    path: Path, grid: ProcessGrid, rollouts: Rollouts, table: RewardTable, estimate: StepAdvantages, log: TokenLog
) -> None:
    """Writes one step: the tokens of every data-parallel replica by one of its ranks, then the rest by rank 0."""
    if grid.is_loss_rank:
        write_tokens(path, grid.dp_rank, trained_rows(estimate), log)
    grid.barrier()
    if grid.is_main:
        write_step(path, [sample.id for sample in rollouts.samples], table, rollouts.truncated, estimate, grid.dp)


def write_tokens(path: Path, replica: int, trained: np.ndarray, log: TokenLog) -> None:
    """Writes what one replica knows of the step `path`, complete or not at all. `trained`: rows of the training batch."""
    chosen = sorted(log.rows)
    arrays = {
        "rows": trained[np.array(chosen, dtype=np.int64)],
        "lengths": np.array([len(log.rows[row][TOKEN_ARRAYS[0]]) for row in chosen], dtype=np.int64),
    }
    for name in dict.fromkeys([*_WRITTEN, *(name for row in chosen for name in log.rows[row])]):
        empty = np.zeros(0, dtype=np.float32)
        arrays[name] = np.concatenate([empty, *(log.rows[row][name] for row in chosen)])
    _save(_part(path, replica), arrays)


def write_step(
    path: Path,
    sample_ids: Sequence[str],
    table: RewardTable,
    truncated: torch.Tensor,
    estimate: StepAdvantages,
    parts: int,
) -> None:
    """Writes one step's file, complete or not at all. `parts`: replicas that have written their tokens."""
    arrays: dict[str, np.ndarray] = {
        "samples": np.array(sample_ids),
        "names": np.array(table.names),
        "weights": np.array([table.weight(name) for name in table.names]),
        "rewards": table.values.numpy(),
        "valid": table.mask.numpy(),
        "truncated": truncated.numpy(),
        "advantages": estimate.advantages.numpy(),
        "clip_range": np.array(estimate.clip_range or ()),
        "parts": np.array(parts),
    }
    if table.lengths is not None:
        arrays["lengths"] = table.lengths.numpy()
    if table.greedy is not None:
        arrays["greedy"] = table.greedy.numpy()
    if table.scored is not None:
        arrays["scored"] = table.scored.numpy()
    if (turns := table.turns) is not None:
        assert estimate.turns is not None or not estimate.train.any()
        arrays |= {
            "turn_count": turns.count.numpy(),
            "turn_lengths": turns.lengths.numpy(),
            "gamma": np.array(turns.gamma),
        }
        arrays |= {f"{_TURN_REWARDS}{name}": rewards.numpy() for name, rewards in turns.rewards.items()}
        if estimate.turns is not None:
            arrays["turn_advantages"] = estimate.turns.numpy()
    _save(path, arrays)


def _part(path: Path, replica: int) -> Path:
    return path.with_suffix(".tokens") / f"{replica}.npz"


def _save(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    os.replace(temporary, path)


def read_step(path: str | Path) -> RecordedStep:
    """Reads a step, rollouts in the order of their rows. ValueError if a file of it is something else, or damaged."""
    path = Path(path)
    arrays = read_arrays(path, ("rewards", "names", "parts"), "a recorded step")
    of_part = ("rows", "lengths", *TOKEN_ARRAYS)
    parts = [read_arrays(_part(path, i), of_part, "a recorded step") for i in range(int(arrays["parts"]))]
    tokens: dict[int, dict[str, np.ndarray]] = {}
    for part in parts:
        ends = np.cumsum(part["lengths"])
        for row, begin, end in zip(part["rows"].tolist(), ends - part["lengths"], ends, strict=True):
            tokens[row] = {name: part[name][begin:end] for name in part if name not in ("rows", "lengths")}
    rows = sorted(tokens)

    def packed(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.float32), *(tokens[row][name] for row in rows)]))

    names = tuple(str(name) for name in arrays["names"])
    tensors = {name: torch.from_numpy(arrays[name]) for name in arrays if arrays[name].dtype.kind in "fb"}
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
            turns=_turns(arrays),
        ),
        truncated=tensors["truncated"],
        advantages=tensors["advantages"],
        rows=torch.tensor(rows, dtype=torch.int64),
        offsets=torch.tensor(np.cumsum([0, *(len(tokens[row][TOKEN_ARRAYS[0]]) for row in rows)])),
        log_probs=packed("log_probs"),
        old_log_probs=packed("old_log_probs"),
        rollout_log_probs=packed("rollout_log_probs"),
        clip_range=(clip_range[0], clip_range[1]) if clip_range else None,
        token_advantages=packed(_BY_TOKEN) if rows and all(_BY_TOKEN in tokens[row] for row in rows) else None,
        turn_advantages=tensors.get("turn_advantages"),
    )


def _turns(arrays: Mapping[str, np.ndarray]) -> TurnRewards | None:
    if "turn_count" not in arrays:
        return None
    rewards = {
        name.removeprefix(_TURN_REWARDS): torch.from_numpy(values)
        for name, values in arrays.items()
        if name.startswith(_TURN_REWARDS)
    }
    count, lengths = torch.from_numpy(arrays["turn_count"]), torch.from_numpy(arrays["turn_lengths"])
    return TurnRewards(count, lengths, rewards, float(arrays["gamma"]))


def recorded_steps(run_dir: str | Path) -> dict[int, Path]:
    """Step -> file, in order, of everything that a run has recorded; files of other names are not its own."""
    files = Path(run_dir).glob("rollouts/step_*.npz")
    return dict(sorted((int(match[1]), path) for path in files if (match := _STEP.fullmatch(path.name))))
