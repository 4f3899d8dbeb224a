"""Where a step's time goes, read from a run's `metrics.jsonl`: generation, forward and backward passes, everything else.

`python -m benchmarks.step --run DIR` reads any run folder. Without `--run` it first runs the quick start, without
evaluations and checkpoints, in `runs/bench_step`; further arguments are overrides of its recipe.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.others import told

RECIPE = "recipes/cpu/quickstart.yaml"
RUN_DIR = "runs/bench_step"
TARGET = 0.15  # largest share of a step that is neither generation nor a forward or backward pass

GENERATION = ("generate",)
COMPUTE = ("old_log_prob", "ref_log_prob", "update")
_PREFIX, _STEP = "timing_s/", "timing_s/step"
_UNTIMED = "(between phases)"


@dataclass(frozen=True)
class StepTimes:
    """Where the time of a run's steady state went.

    Attributes:
        steps: number of the first and of the last step that was looked at.
        seconds: median seconds of a whole step.
        phases: phase -> (median seconds, median share of its step), longest first; `(between phases)` is what no phase
            covers.
        generation, compute, rest: median share of a step, each over the steps; they need not add up to exactly 1.
    """

    steps: tuple[int, int]
    seconds: float
    phases: dict[str, tuple[float, float]]
    generation: float
    compute: float
    rest: float


def read_rows(run_dir: Path) -> list[dict[str, float]]:
    """The rows of RL steps in `metrics.jsonl`, in order.

    Raises:
        ValueError: the file is missing, has a line that is no JSON object, or holds no timed RL step.
    """
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give the folder of a run (its run_dir)")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            raise ValueError(f"{path}, line {number}: not JSON") from None
        if _STEP in row and f"{_PREFIX}generate" in row:
            rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no timed RL step; the run must have done at least one (megatron-rl train)")
    return rows


def step_times(rows: Sequence[Mapping[str, float]]) -> StepTimes:
    """Medians over the last half of the steps (at least one): the start-up's first steps do not count."""
    steady = rows[len(rows) // 2 :]
    names = {name.removeprefix(_PREFIX) for row in steady for name in row if name.startswith(_PREFIX)} - {"step"}
    seconds = {name: [row.get(_PREFIX + name, 0.0) for row in steady] for name in names}
    whole = [row[_STEP] for row in steady]
    seconds[_UNTIMED] = [
        total - sum(row.get(_PREFIX + name, 0.0) for name in names) for total, row in zip(whole, steady, strict=True)
    ]

    def share(chosen: Sequence[str]) -> list[float]:
        return [sum(seconds[name][i] for name in chosen if name in seconds) / total for i, total in enumerate(whole)]

    generation, compute = share(GENERATION), share(COMPUTE)
    phases = {name: (median(values), median(share([name]))) for name, values in seconds.items()}
    return StepTimes(
        steps=(int(steady[0]["step"]), int(steady[-1]["step"])),
        seconds=median(whole),
        phases=dict(sorted(phases.items(), key=lambda item: -item[1][0])),
        generation=median(generation),
        compute=median(compute),
        rest=median(1 - g - c for g, c in zip(generation, compute, strict=True)),
    )


def show(times: StepTimes, console: Console) -> None:
    first, last = times.steps
    phases = Table(title=f"Phases of a step, medians over steps {first} to {last}", title_justify="left")
    for column in ("phase", "counts as", "seconds", "share of step"):
        phases.add_column(column, justify="right" if column in ("seconds", "share of step") else "left")
    for name, (seconds, share) in times.phases.items():
        kind = "generation" if name in GENERATION else "forward/backward" if name in COMPUTE else "rest"
        phases.add_row(name, kind, f"{seconds:.3f}", f"{share:.1%}")
    phases.add_section()
    phases.add_row("step", "", f"{times.seconds:.3f}", "")
    console.print(phases)
    summary = Table(title="Where the time goes", title_justify="left")
    for column in ("part", "share of step"):
        summary.add_column(column, justify="right" if column == "share of step" else "left")
    summary.add_row("generation", f"{times.generation:.1%}")
    summary.add_row("forward/backward (old and reference log-probs, update)", f"{times.compute:.1%}")
    summary.add_row("rest", f"{times.rest:.1%}")
    console.print(summary)
    verdict = "met" if times.rest <= TARGET else "missed"
    console.print(f"target, rest at most {TARGET:.0%} of a step: {verdict}")


def run_quickstart(overrides: Sequence[str]) -> Path:
    """Runs the quick start from scratch, without what is not part of a step. Raises CalledProcessError if it fails."""
    own = [f"run_dir={RUN_DIR}", "trainer.eval_every=0", "checkpoint.every=0", "checkpoint.export=false"]
    command = [sys.executable, "-m", "megatron_rl", "train", RECIPE, *own, *overrides, "--resume", "never"]
    subprocess.run(command, check=True)
    given = [text.partition("=")[2] for text in overrides if text.startswith("run_dir=")]
    return Path(given[-1] if given else RUN_DIR)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description="Where a step's time goes.")
    parser.add_argument(
        "--run", type=Path, metavar="DIR", help="read this run folder instead of running the quick start"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of the quick start's recipe")
    args = parser.parse_args(arguments)
    if args.run is not None and args.overrides:
        parser.error("overrides have no effect with --run")
    console = Console(highlight=False)
    try:
        if args.run is None:
            with told():
                run_dir = run_quickstart(args.overrides)
        else:
            run_dir = args.run
        times = step_times(read_rows(run_dir))
    except subprocess.CalledProcessError as error:
        return int(error.returncode)  # the run has said why
    except ValueError as error:
        print(f"benchmarks.step: {error}", file=sys.stderr)
        return 2
    show(times, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
