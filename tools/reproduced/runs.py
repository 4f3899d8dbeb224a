"""Claims about training: real runs of a recipe's sweep over seeds, and what difference its lines make.

The lines of a claim differ in rewards and algorithm only, so a seed's warm-up is the same for all of them: the first line's
run does it, the others start from its weights, and take the same steps, bit for bit, as if each had done it.
"""

from __future__ import annotations

import resource
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from megatron_rl.config import Config, as_tree, changes
from megatron_rl.launch.job_plan import Task, read_sweep, resolve, sweep
from megatron_rl.launch.local_sweep import LocalSweep, with_seeds
from megatron_rl.report import RunRecord, read_run
from megatron_rl.report.significance import PairedDifference, paired_difference
from reproduced.fig4 import draw_weights, weights_table
from reproduced.page import Page, markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "recipes" / "cpu" / "claims"
RUNS = ROOT  # where the recipes' `run_dir` is
LAST, ALL = "last", "all"
Measure = tuple[str, str]
Results = Mapping[str, Mapping[int, RunRecord]]  # line of the sweep -> seed -> run


@dataclass(frozen=True)
class Claim:
    """A paper's claim as a sweep, `recipes/cpu/claims/<name>.sweep` with the recipe beside it.

    Attributes:
        title: the page's heading.
        measures: a heading for each metric that is compared, and of which step: `LAST`, or the mean over `ALL`.
        baselines: line of the sweep that each line is compared with, None: with none.
        weights: lines whose recorded tokens are drawn as in DGPO's Figure 4, with the paper's names.
    """

    title: str
    measures: Mapping[str, Measure]
    baselines: Sequence[int | None]
    weights: Mapping[int, str] | None = None


CLAIMS = {
    "gdpo": Claim(
        "GDPO: two rewards of unlike size and frequency",
        {
            "value's reward": ("eval/held_out/reward/right", LAST),
            "full stop's reward": ("eval/held_out/reward/marked", LAST),
        },
        (None, 0, 0),
    ),
    "shrinkage": Claim(
        "Shrinkage: variance of the gradient",
        {"variance of the gradient": ("gradient/variance", ALL)},
        (None, 0, 0, 0),
    ),
    "dgpo": Claim(
        "DGPO: sixteen updates per batch",
        {
            "reward of the last batch": ("reward/mean", LAST),
            "held-out accuracy": ("eval/held_out/avg@4", LAST),
            "entropy of the last batch": ("actor/entropy", LAST),
        },
        (None, *[0] * 6),
        {1: "GRPO", 4: "GPPO", 0: "DGPO"},
    ),
    "awpo": Claim(
        "AWPO: a judge beside the outcome",
        {"held-out accuracy": ("eval/held_out/avg@4", LAST), "form": ("eval/held_out/reward/form", LAST)},
        (None, 0, 1, 1, 0, 4, 0, 6, 2),
    ),
}


def train(name: str, seeds: int) -> tuple[Results, float]:
    """Takes what steps are left of every line with the seeds 0 to `seeds` - 1, one run at a time.

    Returns: the runs by line and seed, and the CPU seconds that this took.

    Raises:
        SystemExit: a run ended with another exit code than 0, or is of another recipe than today's.
    """
    recipe, lines = FOLDER / f"{name}.yaml", read_sweep(FOLDER / f"{name}.sweep")
    tasks = sweep(str(recipe), with_seeds(lines, seeds), [], None, RUNS)
    results: dict[str, dict[int, RunRecord]] = {line: {} for line in lines}
    used = _children_seconds()
    for number, task in enumerate(tasks):
        seed, position = divmod(number, len(lines))
        first = tasks[seed * len(lines)]
        arguments = [*task.arguments, *(_warmed_up(first) if position else ())]
        folder = Path(task.arguments[-1].removeprefix("run_dir="))
        if _is_done(folder):
            if changed := other_keys(read_run(folder), resolve("train", task.arguments[1], task.arguments[2:], None)):
                raise SystemExit(f"{folder} is of another recipe ({', '.join(changed)}): move it away")
        elif code := LocalSweep({folder.name: arguments}, 1).run():
            raise SystemExit(f"{folder}: exit code {code}")
        results[lines[position]][seed] = read_run(folder)
    return results, _children_seconds() - used


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _is_done(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file() and read_run(folder).is_complete()


def _warmed_up(first: Task) -> tuple[str, ...]:
    """Overrides with which a run starts from the weights that the run `first` warmed up."""
    folder = first.arguments[-1].removeprefix("run_dir=")
    return "sft.steps=0", "model.create=null", f"model.path='{folder}/checkpoints/step_0'"


def other_keys(run: RunRecord, recipe: Config) -> list[str]:
    """Keys that a run's recipe has otherwise, but for its folder and for who warmed up."""
    keys = [key for key, _, _ in changes(run.recipe, as_tree(recipe))]
    return [key for key in keys if key != "run_dir" and not key.startswith(("model.", "sft."))]


def number_of(run: RunRecord, measure: Measure) -> float:
    """What of a run is compared."""
    metric, of = measure
    values = run.series(metric)[1]
    return values[-1] if of == LAST else fmean(values)


def differences(claim: Claim, results: Results, measure: Measure) -> list[PairedDifference | None]:
    """Of each line from the one it is compared with, over the seeds that both have."""
    runs = list(results.values())
    found: list[PairedDifference | None] = []
    for own, of in zip(runs, claim.baselines, strict=True):
        other = runs[of] if of is not None else {}
        seeds = sorted(own.keys() & other.keys())
        pairs = [[number_of(each[seed], measure) for seed in seeds] for each in (other, own)]
        found.append(paired_difference(*pairs) if len(seeds) > 1 else None)
    return found


def verdict(difference: PairedDifference | None) -> str:
    """Words for a difference, at 5 %."""
    if difference is None:
        return ""
    if difference.p >= 0.05:
        return f"no difference shown: {difference}"
    return f"{'more' if difference.mean > 0 else 'less'}: {difference}"


def make(name: str, seeds: int) -> Page:
    """Trains what is left to train, and compares."""
    claim = CLAIMS[name]
    results, seconds = train(name, seeds)
    lines = list(results)
    blocks = [
        f"`megatron-rl sweep recipes/cpu/claims/{name}.sweep recipes/cpu/claims/{name}.yaml --seeds {seeds}`, "
        f"{time.strftime('%Y-%m-%d')}, {_commit()}, {seconds / 60:.0f} CPU minutes in this call. Means over the seeds; the "
        "difference from the line named last, with an interval of 95 % and p, over seeds (docs/run-folder.md)."
    ]
    for heading, measure in claim.measures.items():
        rows = []
        for line, difference, of in zip(lines, differences(claim, results, measure), claim.baselines, strict=True):
            mean = fmean(number_of(run, measure) for run in results[line].values())
            rows.append([f"`{line}`", mean, verdict(difference), f"`{lines[of]}`" if of is not None else ""])
        blocks += [f"## {heading[0].upper()}{heading[1:]}", markdown_table(("", "mean", "difference", "from"), rows)]

    drawn = {label: results[lines[at]][0].path for at, label in (claim.weights or {}).items()}
    if drawn:
        blocks += [
            "## Figure 4",
            "Tokens of the first recorded batch, seed 0, at the last update on each.",
            weights_table(drawn),
        ]

    def draw(figure: Figure) -> None:
        if drawn:
            draw_weights(figure, drawn)
        else:
            draw_seeds(figure, claim, results)

    return Page(claim.title, blocks, draw, (11, 7) if claim.weights else (11, 4))


def draw_seeds(figure: Figure, claim: Claim, results: Results) -> None:
    """Every seed of every line: a row of points."""
    panels = figure.subplots(1, len(claim.measures), squeeze=False)[0]
    for axes, (heading, measure) in zip(panels, claim.measures.items(), strict=True):
        for position, runs in enumerate(results.values()):
            values = [number_of(run, measure) for run in runs.values()]
            axes.plot(values, [-position] * len(values), "o", alpha=0.5)
        axes.set(xlabel=heading, yticks=[-position for position in range(len(results))])
        axes.set_yticklabels([str(position + 1) for position in range(len(results))])
        axes.set_ylabel("line of the sweep")


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return f"commit {done.stdout.strip()}" if done.returncode == 0 else "not in a repository"
