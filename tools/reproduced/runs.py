"""Takes the runs of a claim: a sweep over seeds, two runs at a time, and the numbers that its sentences compare.

The lines of a claim differ in what comes after the warm-up, but for those that `Trained.warm_up` names: so a seed's warm-up
is done once, by the first line's run, and the others start from its weights and take the same steps, bit for bit, as if each
had done it.
"""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from megatron_rl.config import Config, as_tree, changes
from megatron_rl.launch.job_plan import Task, read_sweep, resolve, sweep
from megatron_rl.launch.local_sweep import LocalSweep
from megatron_rl.report import RunRecord, read_run
from reproduced.claims import Numbers, Record
from reproduced.digest import digest, files_behind
from reproduced.fig4 import draw_weights, weights_table
from reproduced.gradients import draw_grid, measure_all, tables
from reproduced.stated import CLAIMS, FIRST, LAST, Measure, Trained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "recipes" / "cpu" / "claims"
RUNS = ROOT  # where the recipes' `run_dir` is
AT_ONCE = 2  # runs; one thread each
Results = Sequence[Sequence[RunRecord]]  # by line of the sweep and seed


@dataclass(frozen=True)
class Made:
    """A claim's runs, recorded; `draw` draws its figure, of `size` inches."""

    record: Record
    results: Results
    size: tuple[float, float]

    def draw(self, figure: Figure, trained: Trained) -> None:
        if trained.weights:
            draw_weights(figure, self.drawn(trained))
        elif trained.checkpoints:
            draw_grid(figure, self.record.numbers)
        else:
            draw_seeds(figure, self.record.numbers, trained.claim.measures)

    def drawn(self, trained: Trained) -> dict[str, Path]:
        """The runs of seed 0 whose tokens are drawn, by label."""
        return {label: self.results[at][0].path for at, label in trained.weights.items()}


def make(name: str, seeds: Sequence[int]) -> Made:
    """Trains what is left to train, and reads the numbers.

    Raises:
        SystemExit: a run ended with another exit code than 0, or is of another recipe than today's.
    """
    trained, used = CLAIMS[name], _children_seconds()
    results, taken_over = train(name, seeds)
    numbers: Numbers
    if trained.checkpoints:
        numbers = measure_all([run.path for run in results[0]], trained.checkpoints, AT_ONCE)
    else:
        numbers = {
            label: numbers_of(runs, trained.measures) for label, runs in zip(trained.lines, results, strict=True)
        }
    minutes = (_children_seconds() - used) / 60
    files = files_behind(ROOT, FOLDER / f"{name}.yaml", FOLDER / f"{name}.sweep")
    drawn = {label: results[at][0].path for at, label in trained.weights.items()}
    more = ""
    if drawn:
        more = f"Figure 4: tokens of the first recorded batch, seed 0, at the last update on each.\n\n{weights_table(drawn)}"
    elif trained.checkpoints:
        more = tables(numbers)
    made = digest([ROOT / file for file in files])
    day = time.strftime("%Y-%m-%d")
    record = Record(numbers, [*seeds], commit(), day, round(minutes, 1), files, made, more, taken_over)
    height = 7.0 if drawn else 4.0 if trained.checkpoints else 0.8 + 0.35 * len(trained.lines)
    return Made(record, results, (11, height))


def train(name: str, seeds: Sequence[int]) -> tuple[Results, int]:
    """Takes what steps are left of every line with these seeds. Returns the runs by line and seed, and how many were done."""
    lines, warm_up = read_sweep(FOLDER / f"{name}.sweep"), CLAIMS[name].warm_up
    seeded = [f"{line} seed={seed}" for seed in seeds for line in lines]
    tasks = sweep(str(FOLDER / f"{name}.yaml"), seeded, [], None, RUNS)
    first = [number for number in range(len(tasks)) if warm_up.get(number % len(lines), 0) == number % len(lines)]
    taken_over = _take({_folder(tasks[number]): tasks[number].arguments for number in first})
    rest: dict[Path, Sequence[str]] = {}
    for number, task in enumerate(tasks):
        seed, position = divmod(number, len(lines))
        if number not in first:
            begun = _folder(tasks[seed * len(lines) + warm_up.get(position, 0)])
            rest[_folder(task)] = [*task.arguments, *_warmed_up(begun)]
    taken_over += _take(rest)
    by_line = [tasks[position :: len(lines)] for position in range(len(lines))]
    return [[read_run(_folder(task)) for task in of_line] for of_line in by_line], taken_over


def _take(arguments: Mapping[Path, Sequence[str]]) -> int:
    """Takes the runs that are not done yet. Returns how many were."""
    left: dict[str, Sequence[str]] = {}
    for folder, words in arguments.items():
        if not _is_done(folder):
            left[folder.name] = words
            continue
        own = [word for word in words[2:] if not word.startswith("model.")]
        if changed := other_keys(read_run(folder), resolve("train", words[1], own, None)):
            raise SystemExit(f"{folder} is of another recipe ({', '.join(changed)}): move it away")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    local = LocalSweep(left, AT_ONCE, say=_say)
    if left and (code := local.run()):
        raise SystemExit(
            f"{next(iter(arguments)).parent}: exit code {code} of {', '.join(local.failed) or 'the sweep'}"
        )
    return len(arguments) - len(left)


def _say(line: str) -> None:
    """Prints only which runs start and end."""
    if line.startswith("---"):
        print(line, flush=True)


def _folder(task: Task) -> Path:
    return Path(task.arguments[-1].removeprefix("run_dir="))


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _is_done(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file() and read_run(folder).is_complete()


def _warmed_up(folder: Path) -> tuple[str, ...]:
    """Overrides with which a run starts from the weights that the run in `folder` warmed up."""
    return "sft.steps=0", "model.create=null", f"model.path='{folder}/checkpoints/step_0'"


def other_keys(run: RunRecord, recipe: Config) -> list[str]:
    """Returns the keys that a run's recipe has otherwise, but for its folder and the weights that it began with."""
    keys = [key for key, _, _ in changes(run.recipe, as_tree(recipe))]
    return [key for key in keys if key != "run_dir" and not key.startswith("model.")]


def numbers_of(runs: Sequence[RunRecord], measures: Mapping[str, Measure]) -> dict[str, list[float]]:
    """A line's numbers by heading, over the seeds; without those that its method does not have."""
    found = {}
    for heading, (metric, of) in measures.items():
        series = [run.series(metric)[1] for run in runs]
        if all(series):
            found[heading] = [_chosen(values, of) for values in series]
    return found


def _chosen(values: Sequence[float], of: str) -> float:
    return values[0] if of == FIRST else values[-1] if of == LAST else fmean(values)


def draw_seeds(figure: Figure, numbers: Numbers, measures: Sequence[str]) -> None:
    """Every seed of every line: a row of points."""
    panels = figure.subplots(1, len(measures), squeeze=False, sharey=True)[0]
    for axes, heading in zip(panels, measures, strict=True):
        for position, line in enumerate(numbers.values()):
            values = line.get(heading, ())
            axes.plot(values, [-position] * len(values), "o", alpha=0.5)
        axes.set(xlabel=heading, yticks=[-position for position in range(len(numbers))])
    panels[0].set_yticklabels(list(numbers))


def commit() -> str:
    """The commit of the code, and whether code or recipes have been changed since: not the pages, which this writes."""
    git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=False)
    head = git(["git", "log", "-1", "--format=%h"])
    changed = git(["git", "status", "--porcelain", "--", "megatron_rl", "recipes", "tools"])
    if head.returncode:
        return "not in a repository"
    return head.stdout.strip() + ("-dirty" if changed.stdout else "")
