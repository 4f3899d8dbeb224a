"""Reading a run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import yaml

from megatron_rl.names import ConfigError, leaves
from megatron_rl.report.status import attempts_of, no_run
from megatron_rl.runtime.disk import json_lines

Row = Mapping[str, float]  # of metrics.jsonl
_SAMPLED_STEPS = 13  # files of rollouts that are read at least; odd, so that the middle one is among them
_ROLLOUTS, _BYTES = 10_000, 20 * 2**20  # of samples that are read at most, in further files


class RolloutRow(TypedDict):
    """A line of `samples/step_<n>.jsonl`."""

    sample: NotRequired[str]  # its id, as `rollout`; runs of older versions have neither
    rollout: NotRequired[int]
    prompt: str | list[dict[str, object]]
    images: NotRequired[list[str]]  # of the prompt: files in `samples/images`
    response: str
    answer: object
    rewards: dict[str, float | None]  # None: without a score
    advantage: NotRequired[float]  # of training steps
    remarks: NotRequired[
        dict[str, list[tuple[str, bool | None]]]
    ]  # what rewards say of it: lines, and whether right there
    pieces: NotRequired[list[str]]  # texts of the tokens, at steps that are recorded
    finish_reason: NotRequired[str]
    tokens: int


@dataclass(frozen=True)
class RunRecord:
    """One run. `rows` and `sft_rows` are those of the metrics files, in order; `samples` rollouts of some steps."""

    path: Path
    recipe: dict[str, Any]
    rows: Sequence[Row]
    sft_rows: Sequence[Row]
    samples: dict[int, list[RolloutRow]]  # by step: the first, the last, and between them as many as a page holds
    attempts: int

    @property
    def name(self) -> str:
        return self.path.name.encode(errors="backslashreplace").decode()  # file names may be no UTF-8

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """Steps and values of the rows that have the metric."""
        found = [(int(row["step"]), row[metric]) for row in self.rows if row.get(metric) is not None]
        return [step for step, _ in found], [float(value) for _, value in found]

    def metrics(self) -> list[str]:
        return sorted({name for row in self.rows for name in row} - {"step", "time"})

    def steps(self) -> list[Row]:
        """Rows of training steps: without the evaluation before the first."""
        return [row for row in self.rows if row["step"] > 0]


def read_run(path: Path) -> RunRecord:
    """Reads a run folder.

    Raises:
        ConfigError: no recipe or no metrics there; the message says which, and what the folder is instead, if that shows.
    """
    recipe_file, metrics_file = path / "recipe.yaml", path / "metrics.jsonl"
    if not recipe_file.is_file():
        raise ConfigError(no_run(path))
    rows = list(json_lines(metrics_file))
    if not rows:
        raise ConfigError(f"{path} has no metrics yet ({metrics_file.name} is missing or empty)")
    return RunRecord(
        path=path,
        recipe=yaml.safe_load(recipe_file.read_text()),
        rows=rows,
        sft_rows=list(json_lines(path / "sft" / "metrics.jsonl")),
        samples=_read_samples(path / "samples"),
        attempts=len(attempts_of(path)),
    )


def differing_keys(runs: Sequence[RunRecord]) -> dict[str, list[object]]:
    """Recipe keys (dotted) whose values are not the same in all runs, with each run's; `run_dir` left out."""
    flat = [dict(leaves(run.recipe)) for run in runs]
    table = {key: [one.get(key) for one in flat] for one in flat for key in one if key != "run_dir"}
    return {key: values for key, values in table.items() if len(set(map(repr, values))) > 1}


def by_recipe(runs: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Runs whose recipes differ in the seed only (and `run_dir`) together, in the order of the first of each."""
    found: dict[str, list[RunRecord]] = {}
    for run in runs:
        recipe = {key: value for key, value in leaves(run.recipe) if key not in ("seed", "run_dir")}
        found.setdefault(repr(sorted(recipe.items())), []).append(run)
    return list(found.values())


def _read_samples(folder: Path) -> dict[int, list[RolloutRow]]:
    steps = sorted(int(path.stem.removeprefix("step_")) for path in folder.glob("step_*.jsonl"))
    if not steps:
        return {}
    first = folder / f"step_{steps[0]}.jsonl"
    size = sum((folder / f"step_{step}.jsonl").stat().st_size for step in steps) / len(steps)
    fit = min(_ROLLOUTS / max(1, len(list(json_lines(first)))), _BYTES / max(1.0, size))
    count = min(max(_SAMPLED_STEPS, int(fit)), len(steps))
    chosen = {steps[round(i * (len(steps) - 1) / max(1, count - 1))] for i in range(count)}
    read = {step: list(json_lines(folder / f"step_{step}.jsonl")) for step in sorted(chosen)}
    return {step: rows for step, rows in read.items() if rows}
