"""Reading a run folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, NotRequired, TypedDict

from megatron_rl.base.messages import ConfigError, leaves
from megatron_rl.report.status import attempts_of, no_run, read_recipe, read_rows, steps_of
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
    response: str  # of a conversation the last turn
    # Of several turns: the messages after the prompt; of several sequences, each behind a message of the role `sequence`.
    conversation: NotRequired[list[dict[str, object]]]
    turn_tokens: NotRequired[list[int]]  # of each of its assistant's messages
    turn_rewards: NotRequired[dict[str, list[float]]]  # by the agent's column
    turn_advantages: NotRequired[list[float]]
    failed_by: NotRequired[str]  # who broke it off: model | infrastructure
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

    @cached_property
    def keys(self) -> dict[str, Any]:
        """The recipe's keys, dotted, and their values."""
        return dict(leaves(self.recipe))

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """Steps and values of the rows that have the metric."""
        found = [(int(row["step"]), row[metric]) for row in self.rows if row.get(metric) is not None]
        return [step for step, _ in found], [float(value) for _, value in found]

    def errors(self, metric: str) -> dict[int, float]:
        """Step -> standard error of an evaluation's `avg@<n>`; {} for other metrics."""
        task, _, name = metric.rpartition("/")
        return dict(zip(*self.series(f"{task}/stderr"), strict=True)) if name.startswith("avg@") else {}

    def warm_up(self) -> RunRecord | None:
        """The fine-tuning before RL as a run of its own; None without one."""
        return replace(self, rows=self.sft_rows, sft_rows=(), samples={}) if self.sft_rows else None

    def rewards(self, rows: Sequence[RolloutRow]) -> list[float]:
        """Each rollout's reward as `reward/mean` has it: the columns' sum by the recipe's weights. A score that never came
        counts as the mean of the prompt's others, `rows`."""
        totals = [0.0] * len(rows)
        for column in rows[0]["rewards"] if rows else ():
            known = [value for row in rows if (value := row["rewards"].get(column)) is not None]
            filled = fmean(known) if known else 0.0
            weight = self.keys.get(f"rewards.{column.partition('.')[0]}.weight", 1.0)
            for i, row in enumerate(rows):
                value = row["rewards"].get(column)
                totals[i] += weight * (filled if value is None else value)
        return totals

    def metrics(self) -> list[str]:
        return sorted({name for row in self.rows for name in row} - {"step", "time"})

    def is_complete(self) -> bool:
        """Returns whether the run has taken as many steps as its recipe has."""
        return self.rows[-1]["step"] >= steps_of(self.recipe)

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
    rows = read_rows(metrics_file)
    if not rows:
        raise ConfigError(f"{path} has no metrics yet ({metrics_file.name} is missing or empty)")
    return RunRecord(
        path=path,
        recipe=read_recipe(recipe_file),
        rows=rows,
        sft_rows=read_rows(path / "sft" / "metrics.jsonl"),
        samples=_read_samples(path / "samples"),
        attempts=len(attempts_of(path)),
    )


def differing_keys(runs: Sequence[RunRecord]) -> dict[str, list[object]]:
    """Recipe keys (dotted) whose values are not the same in all runs, with each run's; `run_dir` left out."""
    table = {key: [run.keys.get(key) for run in runs] for one in runs for key in one.keys if key != "run_dir"}
    return {
        key: values
        for key, values in table.items()
        if len({repr(None if value == {} else value) for value in values}) > 1  # an empty section is one without keys
    }


def phases_of_step(metrics: Iterable[str]) -> list[str]:
    """Picks the metrics that are seconds of a step's phases; with split placement not of what others do beside it."""
    names = [name for name in metrics if name.startswith("timing_s/") and name != "timing_s/step"]
    beside = ("timing_s/generate", "timing_s/reward") if "timing_s/wait" in names else ()
    return [name for name in names if name not in beside]


def shown_evaluations(metrics: Sequence[str]) -> list[str]:
    """Returns the metrics of evaluations that say something of their own: `stderr` belongs beside `avg@<n>`, and `pass@1`
    is `avg@<n>`."""
    averaged = {name.rpartition("/")[0] for name in metrics if "/avg@" in name}
    return [
        name
        for name in metrics
        if name.startswith("eval/")
        and not name.endswith("/stderr")
        and not (name.endswith("/pass@1") and name.removesuffix("/pass@1") in averaged)
    ]


def by_prompt(rows: Sequence[RolloutRow]) -> list[list[RolloutRow]]:
    """A step's rollouts by group, in order. Rows of old runs have no sample id: their prompt tells them apart."""
    found: dict[str, list[RolloutRow]] = {}
    for row in rows:
        found.setdefault(str(row.get("sample", row["prompt"])), []).append(row)
    return list(found.values())


def by_recipe(runs: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Runs whose recipes differ in the seed only (and `run_dir`) together, in the order of the first of each."""
    found: dict[str, list[RunRecord]] = {}
    for run in runs:
        recipe = {key: value for key, value in run.keys.items() if key not in ("seed", "run_dir")}
        found.setdefault(repr(sorted(recipe.items())), []).append(run)
    return list(found.values())


def recipe_name(run: RunRecord) -> str:
    """Returns the name of a run without its seed: of a sweep's run its line of overrides."""
    line = re.sub(r"(^|_)seed=\d+", "", re.sub(r"^\d{3}-", "", run.name)).strip("_")
    return line or run.name


def _read_samples(folder: Path) -> dict[int, list[RolloutRow]]:
    names = (path.stem.removeprefix("step_") for path in folder.glob("step_*.jsonl"))
    steps = sorted(int(name) for name in names if name.isascii() and name.isdigit())
    if not steps:
        return {}
    first = folder / f"step_{steps[0]}.jsonl"
    size = sum((folder / f"step_{step}.jsonl").stat().st_size for step in steps) / len(steps)
    fit = min(_ROLLOUTS / max(1, len(list(json_lines(first)))), _BYTES / max(1.0, size))
    count = min(max(_SAMPLED_STEPS, int(fit)), len(steps))
    chosen = {steps[round(i * (len(steps) - 1) / max(1, count - 1))] for i in range(count)}
    read = {step: list(json_lines(folder / f"step_{step}.jsonl")) for step in sorted(chosen)}
    for step, rows in read.items():
        if not all(map(_is_rollout, rows)):
            raise ConfigError(
                f"{folder / f'step_{step}.jsonl'} has rows that are no rollouts: prompt, response, rewards and tokens each"
            )
    return {step: rows for step, rows in read.items() if rows}


def _is_rollout(row: object) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("response"), str):
        return False
    has_prompt = isinstance(row.get("prompt"), str) or _are_messages(row.get("prompt"))
    rewards, images = row.get("rewards"), row.get("images", [])
    has_numbers = isinstance(rewards, dict) and all(isinstance(one, int | float | None) for one in rewards.values())
    has_images = isinstance(images, list) and all(isinstance(name, str) for name in images)
    return (
        has_prompt
        and has_numbers
        and has_images
        and isinstance(row.get("tokens"), int)
        and _are_messages(row.get("conversation", []))
    )


def _are_messages(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(turn, dict) for turn in value)
