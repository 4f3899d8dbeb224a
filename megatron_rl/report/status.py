"""The state of a run, from its folder alone: recipe, heartbeats, metrics, checkpoints, post-mortems. Needs no torch."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.base.messages import ConfigError, errors_named, leaves
from megatron_rl.base.plugins import read_yaml
from megatron_rl.checkpoint import manifest
from megatron_rl.runtime import disk, exit_codes, postmortem, process
from megatron_rl.runtime.attempts import END, REFUSED
from megatron_rl.runtime.heartbeat import END as END_PHASE
from megatron_rl.runtime.heartbeat import Beat, beat_interval, heartbeats

_SHOWN_RUNS = 8  # of those in a folder that is none
SILENT_SECONDS = 90.0  # without a heartbeat: six of the slowest beats
_SKEW = 5.0  # seconds that two machines' clocks may differ; the pre-flight warns above that
_INDENT = 14  # columns of the names in the text
_BEATS = 3.0  # how long an old heartbeat is watched before its rank is called silent

_MEANING = {
    exit_codes.OK: "finished",
    exit_codes.FAILED: "an error that a new attempt would meet again",
    exit_codes.BAD_INPUT: "the recipe or its data cannot run",
    exit_codes.PREFLIGHT: "pre-flight found a node unfit",
    exit_codes.REQUEUE: "stopped on request",
    exit_codes.STALLED: "it hung",
    exit_codes.OUT_OF_MEMORY: "memory ran out",
    130: "stopped by Ctrl-C",
    137: "killed (SIGKILL)",
    143: "stopped by SIGTERM",
}
# What has to be done before the run can go on.
_FIRST = {
    exit_codes.FAILED: "fix what the message names",
    exit_codes.BAD_INPUT: "correct what the message names in your recipe or its data (recipe.yaml here is a copy)",
    exit_codes.PREFLIGHT: "fix or exclude what pre-flight names",
    exit_codes.OUT_OF_MEMORY: "make the run smaller (docs/out-of-memory.md)",
}
_ENVIRONMENT = "environment.json"  # in the attempt's folder, written as it begins (`provenance.write`)
SUBMITTED, REQUEUED = "submitted", "requeued"  # in the attempt's folder: slurm/submit.sh's line; the requeued job
# The last of these in a metrics row says how it goes.
_SHOWN = (
    *("reward/mean", "response_length/mean", "groups/signal_share"),
    *("actor/entropy", "actor/grad_norm", "timing_s/step"),
)


@dataclass
class RunStatus:
    """State of a run: what it is doing, or how it ended."""

    run_dir: str
    state: str  # starting | running | silent | finished | stopped | failed | none (no attempt yet)
    attempt: int = 0
    code: int | None = None
    why: str = ""  # for an attempt that has ended: what its exit code means
    says: list[str] = field(default_factory=list)  # the last error message, or the post-mortem's report
    postmortem: str | None = None
    stage: str = ""
    step: int = 0
    steps: int = 0
    phase: str = ""
    phase_seconds: float = 0.0
    heartbeat_age: float | None = None
    slowest: str = ""
    seconds_per_step: float | None = None
    eta_seconds: float | None = None
    checkpoint: str | None = None
    checkpoints: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)
    first: str = ""  # what has to be done before the run can go on; empty: nothing
    continue_with: str | None = None  # the command that continues it, or who does

    def text(self, width: int | None = None) -> str:
        """`width`: columns of the terminal, between whose numbers lines may break; None: none."""
        lines = [f"{self.run_dir}: {self._headline()}"]
        if self.says:
            lines += ["", *(f"  {line}" for line in self.says), ""]
        facts = {
            "post-mortem": self.postmortem,
            "last step": _numbers(self.metrics, width),
            "evaluation": _numbers(self.evaluation, width),
            "checkpoint": f"{self.checkpoint}, of {self.checkpoints}" if self.checkpoint else "none that is whole",
            "attempts": str(self.attempt),
            "first": self.first,
            "to continue": self.continue_with,
        }
        return "\n".join([*lines, *(f"{name:<{_INDENT}}{fact}" for name, fact in facts.items() if fact)])

    def _headline(self) -> str:
        where = f"{self.stage} step {self.step} of {self.steps}" if self.stage else "before its first step"
        if self.state == "none":
            return "no attempt was made yet"
        if self.state == "finished":
            return f"finished, {where}"
        if self.state == "starting":
            return f"starting, {self.heartbeat_age or 0:.0f} s ago" if self.phase == "" else f"starting ({self.phase})"
        if self.state == "running":
            rate = f"; {self.seconds_per_step:.1f} s per step" if self.seconds_per_step else ""
            rest = f", {duration(self.eta_seconds)} to go" if self.eta_seconds is not None else ""
            behind = f"; {self.slowest}" if self.slowest else ""
            return f"running, {where}, in `{self.phase}` for {duration(self.phase_seconds)}{rate}{rest}{behind}"
        if self.state == "silent":
            return (
                f"SILENT: no heartbeat for {duration(self.heartbeat_age or 0)}, {where}, last seen in `{self.phase}`: its "
                "processes were killed or its nodes are gone"
            )
        code = "" if self.code is None else f" with exit code {self.code}"
        return f"{self.state}{code} ({self.why}), {where}"


def no_run(path: Path) -> str:
    """Describes a folder without a recipe: a message, with the runs in it or near it."""
    if not path.is_dir():
        return f"{path} is no run folder: it does not exist"
    runs = sorted(folder.parent for pattern in ("*/recipe.yaml", "*/*/recipe.yaml") for folder in path.glob(pattern))
    shown = ", ".join(map(str, runs[:_SHOWN_RUNS])) + (
        f" and {len(runs) - _SHOWN_RUNS} more" * (len(runs) > _SHOWN_RUNS)
    )
    return f"{path} is no run folder: it has no recipe.yaml" + (f"; there is {shown}" if runs else "")


def read_recipe(path: Path) -> dict[str, Any]:
    """A recipe that a run has kept. ConfigError where it is none."""
    with errors_named(f"{path} cannot be read", OSError, ValueError, as_error=ConfigError):
        recipe = read_yaml(path)
    if not isinstance(recipe, dict):
        raise ConfigError(f"{path} holds no recipe")
    return recipe


def steps_of(recipe: Mapping[str, Any]) -> int:
    """The RL steps of a kept recipe; 0 where it has no such key."""
    steps = dict(leaves(recipe)).get("trainer.steps")
    return steps if isinstance(steps, int) else 0


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics file; none where it is missing. ConfigError where it is something else."""
    with errors_named(f"{path} cannot be read", OSError, ValueError, as_error=ConfigError):
        rows = list(disk.json_lines(path))
        if not all(isinstance(row, dict) and isinstance(row.get("step"), int) for row in rows):
            raise ValueError("it has rows without a step")
        for row in rows:
            if beyond := [
                name for name, value in row.items() if isinstance(value, int) and abs(value) > sys.float_info.max
            ]:
                raise ValueError(f"{beyond[0]} of a row is an integer beyond all floats")
    return rows


def read_status(run_dir: Path) -> RunStatus:
    """Raises:
    ConfigError: no recipe.yaml there, or it or the metrics are damaged.
    """
    recipe_file = run_dir / "recipe.yaml"
    if not recipe_file.is_file():
        raise ConfigError(no_run(run_dir))
    recipe = read_recipe(recipe_file)
    status = RunStatus(str(run_dir), "none")
    attempts = attempts_of(run_dir)
    if attempts:
        status.attempt, attempt = attempts[-1]
        _read_heartbeats(status, attempt)
        _read_end(status, attempt)
        folder = postmortem.folder_of(attempt)
        if folder.is_dir():
            status.postmortem = str(folder)
            if (folder / postmortem.REPORT).is_file():
                status.says = (folder / postmortem.REPORT).read_text(encoding="utf-8").splitlines()
    _read_metrics(status, run_dir, steps_of(recipe), _began(attempts[-1][1]) if attempts else 0.0)
    _read_checkpoints(status, run_dir)
    if status.state in ("stopped", "failed", "silent"):
        _read_way_on(status, attempts[-1][1], recipe_file)
    return status


def _in_queue(job: str) -> bool | None:
    """Whether a Slurm job waits or runs; None where squeue is not at hand or does not answer."""
    if shutil.which("squeue") is None:
        return None
    try:
        queue = subprocess.run(
            ["squeue", "--noheader", f"--jobs={job}"], capture_output=True, text=True, errors="replace", timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if queue.returncode:
        return False if "Invalid job id" in queue.stderr else None
    return bool(queue.stdout.strip())


def _read_way_on(status: RunStatus, attempt: Path, recipe_file: Path) -> None:
    """The remedy, and the command that continues: under Slurm the line that the job was submitted with."""
    status.first = _FIRST.get(status.code or 0, "")
    requeued, submitted = attempt / REQUEUED, attempt / SUBMITTED
    words = _command(attempt)
    line = submitted.read_text(encoding="utf-8").strip() if submitted.is_file() else None
    job = requeued.read_text(encoding="utf-8").strip() if requeued.is_file() else None
    waits = None if job is None else _in_queue(job)
    if job is not None and waits is not False:
        status.continue_with = f"Slurm has requeued job {job}, which continues by itself (squeue --jobs={job})"
        if waits is None and line is not None:
            status.continue_with += f"; if it was cancelled since: {line}"
    elif line is not None:
        status.continue_with = line
    elif status.code != exit_codes.BAD_INPUT:
        status.continue_with = shlex.join(["megatron-rl", *words, str(recipe_file)])
    else:
        status.continue_with = "the same command, with the corrected recipe"
    if words[0] != "evaluate" and not status.checkpoint:  # an evaluation keeps its responses
        status.continue_with += (
            "   (is refused: none of the checkpoints is whole; with --resume never it starts over)"
            if status.checkpoints
            else "   (starts over: there is no checkpoint)"
        )


def attempts_of(run_dir: Path) -> list[tuple[int, Path]]:
    """Attempts of this run, oldest first: an attempt that was refused because the run was alive is none of its starts."""
    return [(k, path) for k, path in _numbered(run_dir / "logs", "attempt_") if not (path / REFUSED).exists()]


def _numbered(folder: Path, prefix: str) -> list[tuple[int, Path]]:
    """`<prefix><number>` in a folder, in order."""
    names = ((path.name.removeprefix(prefix), path) for path in folder.glob(f"{prefix}*"))
    return sorted((int(name), path) for name, path in names if name.isdigit())


def _read_heartbeats(status: RunStatus, attempt: Path) -> None:
    folder = postmortem.heartbeat_folder(attempt)
    beats = heartbeats(folder) if folder.is_dir() else {}
    now = time.time()
    if not beats:
        status.state, status.heartbeat_age = "starting", now - attempt.stat().st_mtime
        if status.heartbeat_age > 10 * SILENT_SECONDS:
            status.state = "silent"
        return
    first = beats[min(beats)]
    ages = {rank: now - beat["time"] for rank, beat in beats.items()}
    status.stage, status.step, status.steps = first["stage"], first["step"], first["steps"]
    status.phase, status.phase_seconds = first["phase"], first["seconds"] + max(0.0, ages[min(beats)])
    status.heartbeat_age = max(0.0, min(ages.values()))
    if all(beat["phase"] == END_PHASE for beat in beats.values()):
        status.state = "finished"
    elif not (attempt / END).is_file():
        silent = _silent_ranks(folder, beats, ages)
        status.state = "silent" if len(silent) == len(beats) else "running" if first["stage"] else "starting"
        if silent and len(silent) < len(beats):
            names = ", ".join(f"{rank} on {beats[rank]['host']}" for rank in silent[:8])
            status.slowest = f"{len(silent)} of {len(beats)} ranks SILENT: {names}"


def _silent_ranks(folder: Path, beats: dict[int, Beat], ages: dict[int, float]) -> list[int]:
    """Ranks whose process is known to have ended, and ranks whose heartbeat looks old and does not move while this watches.

    What looks old may be a clock that was set, or two machines' clocks that differ: hence the second look, some beats later.
    """
    here = process.space()
    gone = [
        rank
        for rank, beat in beats.items()
        if beat["space"] == here and process.started(beat["pid"]) != beat["started"]
    ]
    still = [rank for rank, age in ages.items() if rank not in gone and not -_SKEW < age < SILENT_SECONDS]
    until = time.monotonic() + _BEATS * beat_interval(len(beats))
    while still and time.monotonic() < until:
        time.sleep(0.1)
        now = heartbeats(folder)
        still = [rank for rank in still if rank in now and now[rank]["beat"] == beats[rank]["beat"]]
    return sorted([*gone, *still])


def _read_end(status: RunStatus, attempt: Path) -> None:
    """How the attempt ended, where its launcher has written that down."""
    end = attempt / END
    if not end.is_file():
        return
    code, _, who = end.read_text(encoding="utf-8", errors="replace").strip().partition(" ")
    if not code.isdecimal():
        status.state, status.why = "failed", f"its launcher could not write how to {end}: is the disk full?"
        return
    status.code = int(code)
    stopped = status.code in (exit_codes.REQUEUE, 130, 143)
    status.state = "finished" if status.code == 0 else "stopped" if stopped else "failed"
    status.why = _MEANING.get(status.code, f"ended by signal {status.code - 128}" if status.code > 128 else "unknown")
    if who.startswith("job "):  # of the batch script: no rank could say it
        status.why = who
    if status.code and (match := re.search(r"rank (\d+)", who)):
        # A stop is all ranks' together, and told by the first.
        status.says = _last_words(attempt / f"rank_{0 if stopped else match[1]}.log")


def _last_words(log: Path) -> list[str]:
    """The message, or the traceback's end, with which a rank ended."""
    if not log.is_file():
        return []
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-200:]
    starts = [number for number, line in enumerate(lines) if line.startswith("megatron-rl: ")]
    return lines[starts[-1] :][:30] if starts else lines[-5:]


def _command(attempt: Path) -> list[str]:
    """The subcommand that made the attempt; of an evaluation with the checkpoint, which is not in the recipe."""
    try:
        _, name, *options = json.loads((attempt / _ENVIRONMENT).read_text(encoding="utf-8"))["command"]
        checkpoint = options[options.index("--resume") + 1] if "--resume" in options else "never"
    except (OSError, ValueError, LookupError, TypeError):
        return ["train"]
    return [name, "--model", checkpoint] if name == "evaluate" and checkpoint != "never" else [name]


def _began(attempt: Path) -> float:
    """When an attempt began; 0 where that is not known."""
    written = attempt / _ENVIRONMENT
    return written.stat().st_mtime if written.is_file() else 0.0


def _read_metrics(status: RunStatus, run_dir: Path, steps: int, since: float) -> None:
    """`since`: when the attempt began; the time between two attempts is no step's."""
    rows = read_rows(run_dir / "metrics.jsonl")
    if not rows:
        return
    last = rows[-1]
    status.metrics = {name: last[name] for name in _SHOWN if name in last}
    evaluated: dict[str, float] = next(
        (row for row in reversed(rows) if any(name.startswith("eval/") for name in row)), {}
    )
    status.evaluation = {name: value for name, value in evaluated.items() if re.fullmatch(r"eval/\w+/avg@\d+", name)}
    times = [row["timing_s/step"] for row in rows[-20:] if "timing_s/step" in row]
    if not status.stage or status.state in ("finished", "failed", "stopped"):
        status.stage = status.stage or "RL"
        status.step = max(last["step"], 0)
        status.steps = status.steps or steps
    if times and status.stage != "SFT":
        recent = [row["time"] for row in rows[-20:] if row.get("time", 0.0) > since]
        whole = (recent[-1] - recent[0]) / (len(recent) - 1) if len(recent) > 1 else 0.0  # with evaluations and saves
        status.seconds_per_step = max(sum(times) / len(times), whole)
        status.eta_seconds = status.seconds_per_step * max(0, status.steps - last["step"])


def _read_checkpoints(status: RunStatus, run_dir: Path) -> None:
    """RL's; until it has one, those of its warm-up (checkpoint.store.folder_of, which needs torch)."""
    for root, stage in ((run_dir, ""), (run_dir / "sft", " of the warm-up")):
        found = _numbered(root / "checkpoints", "step_")
        newest = next((path.name for _, path in reversed(found) if manifest.missing(path) is None), None)
        if found:
            status.checkpoints, status.checkpoint = len(found), newest and newest + stage
            return


def _numbers(metrics: Mapping[str, float], width: int | None) -> str:
    """Names and values, in as many lines as it takes."""
    lines = [""]
    for name, value in metrics.items():
        told = f"{name} {value:.4g}"
        if lines[-1] and width is not None and _INDENT + len(lines[-1]) + 2 + len(told) > width:
            lines.append("")
        lines[-1] += f"{'  ' if lines[-1] else ''}{told}"
    return f"\n{'':<{_INDENT}}".join(lines)


def duration(seconds: float) -> str:
    """13, 754, 9000 -> `13 s`, `12 min 34 s`, `2 h 30 min`."""
    if not math.isfinite(seconds):
        return f"{seconds} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
