"""Runs with kills beside runs without, and what differs between them."""

from __future__ import annotations

import json
import math
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint import manifest, store
from megatron_rl.config import check, load_recipe, to_yaml
from megatron_rl.config.machine import Machine, count_gpus
from megatron_rl.data.like_lengths import LENGTHS
from megatron_rl.resume_proof.kills import Kill
from megatron_rl.resume_proof.points import POINTS
from megatron_rl.resume_proof.starts import Start, start_anew
from megatron_rl.rollout.ahead import AHEAD
from megatron_rl.rollout.partial import WAITING
from megatron_rl.runtime.heartbeat import heartbeats
from megatron_rl.runtime.postmortem import heartbeat_folder

_SHORT = 0.05  # seconds of a phase that a timer would miss: killed as it begins
_CLOCK = (
    "timing_s/",
    "perf/",
    "memory/",
    "checkpoint/",
    "reward_overlap/",
    "conversation/prefix_hit_share",
    "rollouts/draft",
)
_KILLED = 128 + signal.SIGKILL


@dataclass
class Proof:
    """Outcome of one preset."""

    preset: str
    killed: list[Kill] = field(default_factory=list)
    found: list[str] = field(default_factory=list)  # the phase that the killing rank was in, of each
    missed: int = 0  # kills that came to nothing, because the run was done before
    compared: str = ""
    differences: list[str] = field(default_factory=list)
    seconds: float = 0.0


def resolved(recipe: Path, overrides: Sequence[str], run_dir: Path, command: str = "train") -> str:
    config = load_recipe(recipe, [*overrides, f"run_dir={run_dir}"])
    return to_yaml(check(config, command=command, machine=Machine(gpus=count_gpus())))


def draw(
    random_: random.Random,
    kills: int,
    steps: int,
    seconds: Mapping[str, float],
    turns: int = 0,
    step_parts: Sequence[str] = (),
    generator: int = 0,
) -> list[Kill]:
    """Kills in every part of a step equally often, in random order, at a random moment of a longer phase, from the first step
    to the last but one: where one lets the run get a step further, the next still finds it running.

    Args:
        seconds: how long each point takes.
        turns: of conversations, that an engine has in a step; a kill comes after any of them.
        step_parts: of POINTS; none: all that the run has.
        generator: the first rank that generates.
    """
    step_parts = list(step_parts) or [part for part in POINTS if turns or part != "turn"]
    drawn_parts = [part for _ in range(kills) for part in step_parts][:kills]
    random_.shuffle(drawn_parts)
    drawn = []
    for i, name in enumerate(drawn_parts):
        point, step = random_.choice(POINTS[name]), i * steps // kills
        taken = seconds.get(point, 0.0)
        delay = round(random_.uniform(0, 0.9) * taken, 4) if taken > _SHORT else 0.0
        rank = generator if point in ("generate", "turn", "reward") else 0
        drawn.append(Kill(point, random_.randint(1, turns) if name == "turn" else 1, delay, step, rank))
    return drawn


def turns_of(run_dir: Path) -> int:
    """How many turns of conversations an engine had in the step of a finished run that had fewest; 0: there were none."""
    config = load_recipe(run_dir / "recipe.yaml")
    assert config.launch.processes is not None
    engines = (config.launch.generators or config.launch.processes) // config.rollout.tensor_parallel
    means = [row["conversation/turns"] for row in untimed_rows(run_dir) if "conversation/turns" in row]
    conversations = config.trainer.prompts_per_step * config.rollout.group_size / engines
    return max(1, math.floor(conversations * min(means))) if means else 0


def durations(run_dir: Path) -> dict[str, float]:
    """Median seconds of every point in a finished run."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    names = {point: f"timing_s/{point}" for points in POINTS.values() for point in points}
    names["write"] = "checkpoint/write_s"
    taken = {point: [row[name] for row in rows if name in row] for point, name in names.items()}
    return {point: statistics.median(values) for point, values in taken.items() if values}


def prove(
    recipe: Path, overrides: Sequence[str], folder: Path, kills: Sequence[Kill], straight: Path, *starts: Start
) -> Proof:
    """Runs it with the kills and compares with the run without them.

    Args:
        straight: the folder of the run without.
        starts: how to start ranks, in turn.

    Raises:
        RuntimeError: a start failed by itself.
    """
    begin, proof, killed = time.monotonic(), Proof(""), folder / "killed"
    text, starts = resolved(recipe, overrides, killed), starts or (start_anew,)
    for i, kill in enumerate([*kills, None]):
        code = starts[i % len(starts)]("train", text, killed, kill)
        if code == _KILLED and kill is not None:
            proof.killed.append(kill)
            proof.found.append(_phase(killed, kill.rank))
        elif code == 0:
            proof.missed = len(kills) - len(proof.killed)
            break
        else:
            raise RuntimeError(f"a start ended with {code}; see {killed / 'logs'}")
    proof.differences, proof.compared = differences(straight, killed), compared(straight)
    proof.seconds = time.monotonic() - begin
    return proof


def _phase(run_dir: Path, rank: int) -> str:
    """Where a rank of the last start was, by its heartbeat."""
    attempts = sorted((run_dir / "logs").glob("attempt_*"), key=lambda path: int(path.name.removeprefix("attempt_")))
    beat = heartbeats(heartbeat_folder(attempts[-1]))[rank]
    return f"{beat['phase']} of step {beat['step']}"


def differences(want: Path, killed: Path) -> list[str]:
    """Differences of two finished runs; [] where nothing differs."""
    unequal = []
    for name in ("metrics.jsonl", "sft/metrics.jsonl"):
        before, after = untimed_rows(want, name), untimed_rows(killed, name)
        for a, b in zip(before, after, strict=False):
            unequal += [
                f"{name}, step {a['step']}: {key}" for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)
            ]
        if len(before) != len(after):
            unequal.append(f"{name} has {len(after)} rows, not {len(before)}")
    names = {path.name for folder in (want, killed) for path in (folder / "samples").glob("*.jsonl")}
    unequal += [
        f"samples/{name}"
        for name in sorted(names)
        if _bytes(want / "samples" / name) != _bytes(killed / "samples" / name)
    ]
    last = store.newest(want / "checkpoints")
    if last is None:
        return [*unequal, "there is no checkpoint to compare"]
    other = killed / "checkpoints" / last.name
    if damage := manifest.verify(other):
        return [*unequal, *damage]
    saved, again = (
        {(piece.name, piece.start): piece.digest for piece in manifest.read_tensors(folder)[1]}
        for folder in (last, other)
    )
    changed = sorted(key for key in saved.keys() | again.keys() if saved.get(key) != again.get(key))
    unequal += [f"{last.name}: tensor {name} at {list(start)}" for name, start in changed]
    own_facts = ("metrics_bytes", "run")  # of each run folder
    states = [{k: v for k, v in store.read_state(folder).items() if k not in own_facts} for folder in (last, other)]
    if states[0] != states[1]:
        unequal.append(f"{last.name}/state.json")
    unequal += [
        f"{last.name}/{name}" for name in (WAITING, AHEAD, LENGTHS) if _bytes(last / name) != _bytes(other / name)
    ]
    weights = {path.name for path in (want / "export").glob("*.safetensors")}
    unequal += [
        f"export/{name}"
        for name in sorted(weights)
        if _bytes(want / "export" / name) != _bytes(killed / "export" / name)
    ]
    return unequal


def untimed_rows(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    path = run_dir / name  # a run without a warm-up has no sft/
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{k: v for k, v in row.items() if k != "time" and not k.startswith(_CLOCK)} for row in rows]


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def compared(run_dir: Path) -> str:
    """How much there was to compare, for people."""
    last = store.newest(run_dir / "checkpoints")
    pieces = len(manifest.read_tensors(last)[1]) if last else 0
    numbers = sum(len(row) for row in untimed_rows(run_dir))
    samples = sum(path.read_bytes().count(b"\n") for path in (run_dir / "samples").glob("*.jsonl"))
    return f"{numbers} metrics, {samples} samples, {pieces} pieces of tensors"


def table(proofs: Sequence[Proof]) -> str:
    lines = [f"| preset | {' | '.join(POINTS)} | compared | differences | s |", "|---|" + "---|" * (len(POINTS) + 3)]
    for proof in proofs:
        points = Counter(part for kill in proof.killed for part, names in POINTS.items() if kill.point in names)
        what = "; ".join(proof.differences[:3]) or "none"
        what += f" ({proof.missed} kills came too late)" if proof.missed else ""
        counts = " | ".join(str(points[part]) for part in POINTS)
        lines.append(f"| `{proof.preset}` | {counts} | {proof.compared} | {what} | {proof.seconds:.0f} |")
    return "\n".join(lines) + "\n"


def _run(start: Start, recipe: Path, overrides: Sequence[str], run_dir: Path, command: str = "train") -> Path:
    code = start(command, resolved(recipe, overrides, run_dir, command), run_dir, None)
    if code != 0:
        raise RuntimeError(f"the run without interruption ended with {code}; see {run_dir / 'logs'}")
    return run_dir


def prove_all(
    recipe: Path,
    overrides: Sequence[str],
    presets: Sequence[str],
    out: Path,
    *,
    kills: int,
    steps: int,
    seed: int,
    starts: Sequence[Start],
    step_parts: Sequence[str] = (),
) -> list[Proof]:
    """A proof for each preset (`""`: the recipe's own method), from one warm-up; prints each, and writes `table.md`.

    Args:
        out: folder for the runs.
        kills: for every preset.
        steps: RL steps of a run.
        seed: of the points.
        starts: how to start ranks, in turn.
        step_parts: of a step in which kills come; none: all that the run has.
    """
    shared = [f"trainer.steps={steps}", "checkpoint.every=1", "checkpoint.keep=2", *overrides]
    if load_recipe(recipe, shared).sft.steps:
        warm = _run(starts[0], recipe, [*shared, "checkpoint.every=0"], out / "warm", "sft")
        shared += [f"model.path={warm / 'export'}", "sft.steps=0"]
    proofs, random_ = [], random.Random(seed)
    for name in presets:
        own, folder = [*shared, *([f"algorithm.preset={name}"] if name else [])], out / (name or "recipe")
        straight = _run(starts[0], recipe, own, folder / "straight")
        launch = load_recipe(straight / "recipe.yaml").launch
        generator = (launch.processes or 0) - launch.generators if launch.generators else 0
        drawn = draw(random_, kills, steps, durations(straight), turns_of(straight), step_parts, generator)
        proof = prove(recipe, own, folder, drawn, straight, *reversed(starts))
        proof.preset = name or "(the recipe's)"
        proofs.append(proof)
        (out / "table.md").write_text(table(proofs))
        print(table([proof]).splitlines()[-1], flush=True)
        for kill, found in zip(proof.killed, proof.found, strict=True):
            print(f"    {kill}: killed in {found}", flush=True)
    return proofs
