"""The terminal output and the files in the run folder. Only rank 0 writes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from megatron_rl.agents import journal
from megatron_rl.agents.journal import Resumed
from megatron_rl.config.schema import Config, SupervisedConfig
from megatron_rl.data.rollout import Rollout
from megatron_rl.data.sample import Sample
from megatron_rl.evaluation.samples import write_samples
from megatron_rl.report import read_run, render
from megatron_rl.report.run_record import phases_of_step, shown_evaluations
from megatron_rl.rewards import ScoringStats
from megatron_rl.runtime import disk
from megatron_rl.runtime.distributed import ProcessGrid
from megatron_rl.runtime.heartbeat import HEARTBEAT
from megatron_rl.trainer.lines import STAGE, STEP, line
from megatron_rl.trainer.trackers import Tracker, make_trackers

_OUTPUTS = (
    *("metrics.jsonl", "evaluation.json", "report.html", "sft", "checkpoints", "samples", "rollouts", "tensorboard"),
    *("reference", "export", "adapter", "responses", "harness", "wandb_id", "mlflow_id", "run_id", journal.FOLDER),
)


class Reporter:
    """Metrics to `metrics.jsonl`, TensorBoard and trackers; rollouts to `samples/`; progress to the terminal."""

    def __init__(self, config: Config, run_dir: Path, grid: ProcessGrid, command: str = "train") -> None:
        self.config, self.run_dir, self.command = config, run_dir, command
        self.active = grid.is_main
        self.console = Console(quiet=not self.active, highlight=False)
        self.console.soft_wrap = (
            not self.console.is_terminal
        )  # a file's lines have no end, a terminal's break between words
        self._started = time.monotonic()
        self._first_eval: dict[str, float] = {}
        self._last_eval: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._stage_seconds: dict[str, float] = {}
        self._stage: tuple[str, float] | None = None
        self._missing: set[str] = set()  # reward columns already warned about
        self._trackers: list[Tracker] = []
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.fields[stage]}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not (self.active and self.console.is_terminal),
        )
        self._task = self._progress.add_task("", total=None, stage="start")
        self._progress.start()

    # ------------------------------------------------------------------------------------------------ where a run begins
    def start_over(self, keep: str | None = None) -> None:
        """A run without a checkpoint to continue from: what an earlier one left there, but for `keep`, is archived."""
        if not self.active:
            return
        left = [name for name in _OUTPUTS if (self.run_dir / name).exists() and name != keep]
        if left:
            archive = disk.next_previous(self.run_dir)
            archive.mkdir()
            for name in left:
                os.rename(self.run_dir / name, archive / name)
            self.note(f"moved an earlier run's {', '.join(left)} to {archive}")
        self._start_trackers(0)

    def continue_from(self, step: int, metrics_bytes: int | None = None, warm_up: bool = False) -> None:
        """Continues after `step` of RL, or of its warm-up: removes metrics, samples and rollouts of later steps, which will
        be done again.
        `metrics_bytes`: how long the stage's metrics file was after that step, where that is known.
        """
        if self.active:
            kept = self._cut(self._metrics(warm_up), step, metrics_bytes)
            if warm_up:
                self._cut(self._metrics(), -1)
            for row in [] if warm_up else kept:
                self._remember(row)
            _remove_later(self.run_dir, -1 if warm_up else step)
        self.note(f"continuing after step {step}{' of the warm-up' if warm_up else ''}")
        self._start_trackers(0 if warm_up else step)

    def _metrics(self, warm_up: bool = False) -> Path:
        return self.run_dir / "sft" / "metrics.jsonl" if warm_up else self.run_dir / "metrics.jsonl"

    def _cut(self, path: Path, step: int, num_bytes: int | None = None) -> list[dict[str, float]]:
        """Removes rows after `step`; returns the others."""
        rows = [row for row in disk.json_lines(path) if row["step"] <= step]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        if num_bytes is not None and len(text.encode()) != num_bytes:
            self.warn(
                f"{path.relative_to(self.run_dir)} has {len(text.encode())} bytes up to step {step}, {num_bytes} were "
                "written: rows are missing or were changed"
            )
        if text or path.exists():
            path.parent.mkdir(exist_ok=True)
            disk.replace(path, text)
        return rows

    def _start_trackers(self, step: int) -> None:
        if self.active:
            self._trackers = make_trackers(self.config, self.run_dir, step)

    # ---------------------------------------------------------------------------------------------------------- progress
    def phase(self, name: str) -> None:
        """Shows the current phase."""
        self._progress.update(self._task, description=name.replace("_", " "))

    def note(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False)  # it may quote anything: [/INST] is no markup

    def warn(self, text: str) -> None:
        self.console.print(text, style="bold yellow", markup=False)

    def missing_scores(self, scored: ScoringStats) -> None:
        """Says why a server gave a rollout no score, once per reward; how often is in the metrics."""
        for column, (counts, _) in scored.remote.items():
            if counts.no_score and column not in self._missing:
                self._missing.add(column)
                self.warn(
                    f"{column}: {counts.no_score.total()} of {counts.scored} rollouts have no score from the server: "
                    f"{counts.example} (further ones are counted by {column}/no_score; reasons in answers/{column}/)"
                )

    def lost_conversations(self, reasons: Sequence[Counter[str]]) -> None:
        """Says why conversations were lost to failures that were not the policy's. `reasons`: of every rank."""
        lost = sum(reasons, Counter[str]())
        if lost:
            shown = "; ".join(f"{count} x {reason}" for reason, count in lost.most_common(3))
            self.warn(f"{lost.total()} conversations were lost and leave their groups: {shown}")

    def resumed_conversations(self, step: int, resumed: Resumed) -> None:
        """Says what was made of the journals of a step that an earlier start of the run had begun."""
        if text := str(resumed):
            self.note(f"conversations of step {step} in the journal: {text}")

    def begin(self, stage: str, done: int, total: int) -> None:
        """A stage of `total` steps, `done` of which are behind."""
        self._end_stage()
        HEARTBEAT.begin(stage, done, total)
        self._stage = (stage, time.monotonic())
        self._stage_seconds.setdefault(stage, 0.0)
        self._progress.update(self._task, stage=stage, completed=done, total=total)
        self.console.print(f"[bold]{stage}[/bold]: {total - done} of {total} steps to go")

    @contextlib.contextmanager
    def apart(self, name: str) -> Iterator[None]:
        """Times what takes long between stages, or within one, and is none of its steps."""
        begin = time.monotonic()
        yield
        seconds = time.monotonic() - begin
        self._stage_seconds[name] = self._stage_seconds.get(name, 0.0) + seconds
        if self._stage is not None:
            self._stage = (self._stage[0], self._stage[1] + seconds)

    def _end_stage(self) -> None:
        if self._stage is not None:
            name, begin = self._stage
            self._stage_seconds[name] = self._stage_seconds.get(name, 0.0) + time.monotonic() - begin
            self._stage = None

    # ----------------------------------------------------------------------------------------------------------- metrics
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row of `metrics.jsonl`, and the step's line."""
        trainer = self.config.trainer
        fields = [  # with a single update the old policy is the policy
            field for field in STEP if field.metric != "old_policy/kl_k3" or trainer.minibatches * trainer.epochs > 1
        ]
        self._log(
            step, metrics, line(f"step {step:>4}", fields, metrics, self._width()) if "timing_s/step" in metrics else ""
        )

    def _width(self) -> int | None:
        """Columns of the terminal; None for a file or a pipe."""
        return self.console.width if self.console.is_terminal else None

    def _log(self, step: int, metrics: Mapping[str, float], line: str, warm_up: bool = False) -> None:
        if not self.active:
            return
        row = {"step": step, "time": round(time.time(), 3), **{k: metrics[k] for k in sorted(metrics)}}
        path = self._metrics(warm_up)
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if not warm_up:
            self._remember(row)
            for tracker in self._trackers:
                tracker.log(step, metrics)
        self._progress.update(self._task, completed=step)
        if line:
            self.console.print(line)
        for name, value in metrics.items():
            if name.startswith("eval/") and "/avg@" in name:
                task = name.split("/")[1]
                length = metrics.get(f"eval/{task}/response_length")  # a harness tells none
                more = "" if length is None else f", length {length:.1f}"
                self.console.print(f"[bold]eval[/bold] {task} at step {step}: {name.split('/')[-1]} {value:.3f}{more}")

    def flush_metrics(self, warm_up: bool = False) -> int:
        """Waits until all rows of `metrics.jsonl`, or of the warm-up's, are on the disk; its length in bytes."""
        path = self._metrics(warm_up)
        if not self.active or not path.exists():
            return 0
        with path.open("rb") as file:
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_size

    def log_stage(self, name: str, section: SupervisedConfig, step: int, metrics: Mapping[str, float]) -> None:
        """One row of `metrics.jsonl` (of `sft/metrics.jsonl` in the warm-up before RL), and a line."""
        if not self.active:
            return
        shows = step % max(section.log_every, section.steps // 10) == 0 or step == section.steps
        told = line(f"{name.lower()} step {step:>4}", STAGE, metrics, self._width()) if shows else ""
        self._log(step, metrics, told, self.command == "train")

    def _remember(self, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            if name.startswith("eval/"):
                self._first_eval.setdefault(name, value)
                self._last_eval[name] = value
            elif name.startswith("timing_s/") and name != "timing_s/step":
                self._seconds[name] = self._seconds.get(name, 0.0) + value

    # ----------------------------------------------------------------------------------------------------------- samples
    def samples(
        self,
        step: int,
        samples: Sequence[Sample],
        rollouts: Sequence[Rollout],
        advantages: Tensor,
        of_turns: Tensor | None,
        details: Sequence[Mapping[str, object]],
    ) -> None:
        """`samples/step_<n>.jsonl`: the step's first rollouts, whole groups first, with rewards and advantages, [n, m] and
        where turns have some [n, m, T]; and what else is known of each, `details`."""
        if self.active:
            values = advantages.flatten().tolist()[: len(rollouts)]
            extra = [{"advantage": value, **more} for value, more in zip(values, details, strict=True)]
            if of_turns is not None:
                for more, rollout, turns in zip(extra, rollouts, of_turns.flatten(0, 1).tolist(), strict=False):
                    more["turn_advantages"] = turns[: len(rollout.turn_lengths)]
            write_samples(self.run_dir / "samples" / f"step_{step}.jsonl", samples, rollouts, extra)

    def records(self, step: int) -> bool:
        """Whether this step's rollouts are to be recorded; the same on every rank."""
        every = self.config.logging.record_every
        return bool(every) and step % every == 0

    def eval_samples(self, step: int, task: str, samples: Sequence[Sample], rollouts: Sequence[Rollout]) -> None:
        """`samples/eval_<task>_step_<n>.jsonl`."""
        if self.active:
            path = self.run_dir / "samples" / f"eval_{task}_step_{step}.jsonl"
            write_samples(path, samples, rollouts, [{} for _ in rollouts])

    # --------------------------------------------------------------------------------------------------------------- end
    def summary(self) -> None:
        """Start and end of every evaluation, where the time went, and where things are."""
        self._end_stage()
        self._progress.stop()
        if not self.active:
            return
        evaluations = Table(title="Held-out prompts", title_justify="left")
        for column in ("metric", "start", "end", "change"):
            evaluations.add_column(column, justify="left" if column == "metric" else "right")
        for name in shown_evaluations([*self._first_eval]):
            first, last = self._first_eval[name], self._last_eval[name]
            cells = [self._with_error(name, first, self._first_eval), self._with_error(name, last, self._last_eval)]
            evaluations.add_row(name.removeprefix("eval/"), *cells, f"{last - first:+.3f}")
        if self._first_eval and self.command != "evaluate":
            self.console.print(evaluations)
        total = time.monotonic() - self._started
        parts = [f"{name} {seconds:.0f} s" for name, seconds in self._stage_seconds.items()]
        self.console.print(f"This process ran {total:.0f} s{': ' if parts else ''}{', '.join(parts)}")
        seconds = {name: self._seconds[name] for name in phases_of_step(self._seconds)}
        spent = sum(seconds.values())
        if spent:
            shares = sorted(seconds.items(), key=lambda item: -item[1])
            shown = ", ".join(f"{name.removeprefix('timing_s/')} {value / spent:.0%}" for name, value in shares)
            self.console.print(f"Time within {'RL' if self.command == 'train' else self.command} steps: {shown}")
        has_metrics = (self.run_dir / "metrics.jsonl").is_file()  # none where a checkpoint was exported without a step
        if self.config.logging.report and self.command != "evaluate" and has_metrics:
            disk.replace(self.run_dir / "report.html", render([read_run(self.run_dir)]))
        self.console.print(f"Everything is in {self.run_dir}: " + ", ".join(self._files()), markup=False)

    @staticmethod
    def _with_error(name: str, value: float, evaluated: Mapping[str, float]) -> str:
        task, _, short = name.rpartition("/")
        error = evaluated.get(f"{task}/stderr") if short.startswith("avg@") else None
        return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"

    def _files(self) -> list[str]:
        return [name for name in ("recipe.yaml", *_OUTPUTS, "logs") if (self.run_dir / name).exists()]

    def close(self) -> None:
        self._progress.stop()
        for tracker in self._trackers:
            try:
                tracker.close()
            except OSError as error:  # the disk that ended the run: metrics.jsonl has what is lost here
                self.warn(f"the newest metrics are missing in {type(tracker).__name__}: {error}")


def _remove_later(run_dir: Path, step: int) -> None:
    for path in [*(run_dir / "samples").glob("*step_*.jsonl"), *(run_dir / "rollouts").glob("step_*")]:
        if (number := path.stem.rpartition("step_")[2]).isdigit() and int(number) > step:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
