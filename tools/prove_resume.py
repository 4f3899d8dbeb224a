"""Proves on a recipe that a killed run, continued, is the run that was never killed: bit for bit.

python tools/prove_resume.py RECIPE [--kills 10] [--presets all|a,b] [--steps 4] [--out DIR] [key=value …]

For every preset: one run without interruption, and one whose processes are all killed with SIGKILL at points drawn at
random, as many in each of generation, reward, training, sync and save, and that is started again after each. Then metrics
(all but times and memory), samples, every tensor of the last checkpoint (weights and optimizer), the estimator's state and
the export are compared. In every run Python's, NumPy's and torch's generators get another random state at every phase, so
that a state which a checkpoint would have to carry shows. The recipe's warm-up, if it has one, is run once for all presets.
Writes `table.md`; ends with 1 where anything differs or a kill came too late.

Without a GPU, ranks are forked from two processes that have imported everything and done nothing, in turn, so that a start
takes a few seconds; the two have other hash seeds, as any two processes. With one, or with --fresh, each is a new process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint import manifest, store
from megatron_rl.config import check, load_recipe, to_yaml
from megatron_rl.config.checks import Machine, count_gpus
from megatron_rl.config.presets import list_presets
from megatron_rl.runtime.attempts import ATTEMPT, free_port, new_attempt, rank_environment
from megatron_rl.runtime.heartbeat import heartbeats
from megatron_rl.runtime.postmortem import heartbeat_folder
from megatron_rl.runtime.spawn import run_ranks

# Phases of a step, and two of a writer: while it writes, and at the rename that makes a checkpoint current.
POINTS: Mapping[str, tuple[str, ...]] = {
    "generation": ("generate",),
    "reward": ("reward",),
    "training": ("estimate", "old_log_prob", "update"),
    "sync": ("sync", "sync_check"),
    "save": ("checkpoint", "write", "rename"),
}
_SHORT = 0.05  # seconds of a phase that a timer would miss: killed as it begins
_CLOCK = ("timing_s/", "perf/", "memory/", "checkpoint/", "reward_overlap/")
_KILLED = 128 + signal.SIGKILL

# Starts all ranks of (command, resolved recipe, run folder) up to the end or the kill; the exit code.
Start = Callable[[str, str, Path, "Kill | None"], int]


@dataclass(frozen=True)
class Kill:
    """SIGKILL to every rank, `delay` seconds after the `count`-th time that rank 0 comes to `point` in this start, from step
    `step` on."""

    point: str
    count: int = 1
    delay: float = 0.0
    step: int = 0

    def __str__(self) -> str:
        return f"{self.point} {self.count} + {self.delay:.2f} s from step {self.step} on"


@dataclass
class Proof:
    """What came of one preset."""

    preset: str
    killed: list[Kill] = field(default_factory=list)
    found: list[str] = field(default_factory=list)  # the phase that rank 0 was in when it was killed, of each
    missed: int = 0  # kills that came to nothing, because the run was done before
    compared: str = ""
    differences: list[str] = field(default_factory=list)
    seconds: float = 0.0


# --------------------------------------------------------------------------------------------------------- in a rank
def as_rank(command: str, run_dir: str, kill: Kill | None, others: Callable[[], Sequence[int]]) -> int:
    """`others`: the processes of the other ranks."""
    scramble()
    if kill is not None and os.environ["RANK"] == "0":
        arm(kill, others)
    from megatron_rl.trainer.main import main as run_rank

    return run_rank(command, run_dir, str(Path(run_dir) / "recipe.yaml"), "auto")


def scramble() -> None:
    """Gives every generator of random numbers another state whenever a phase begins: a run may depend on none of them."""
    import numpy as np
    import torch

    from megatron_rl.runtime.heartbeat import HEARTBEAT

    enter = HEARTBEAT.enter

    def entered(phase: str) -> None:
        seed = int.from_bytes(os.urandom(4), "little")
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        enter(phase)

    HEARTBEAT.enter = entered  # type: ignore[method-assign]


def arm(kill: Kill, others: Callable[[], Sequence[int]]) -> None:
    """Hooks the function that marks the point."""
    seen = 0

    def die() -> None:
        """What a machine that goes down does: nobody gets to do anything more, this process last."""
        for pid in others():
            os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def passing(name: str) -> None:
        nonlocal seen
        if name != kill.point or HEARTBEAT.step < kill.step:
            return
        seen += 1
        if seen == kill.count and kill.delay:
            threading.Timer(kill.delay, die).start()
        elif seen == kill.count:
            die()

    from megatron_rl.checkpoint import saver
    from megatron_rl.checkpoint import snapshot as snapshots
    from megatron_rl.runtime.heartbeat import HEARTBEAT

    if kill.point == "write":
        snapshots.write_share = _after(lambda: passing("write"), snapshots.write_share)
    elif kill.point == "rename":
        saver._replace = _after(lambda: passing("rename"), saver._replace)
    else:
        enter = HEARTBEAT.enter

        def entered(name: str) -> None:
            enter(name)  # so that the heartbeat says where it ended
            passing(name)

        HEARTBEAT.enter = entered  # type: ignore[method-assign, assignment]


def _after(first: Callable[[], None], then: Callable[..., Any]) -> Callable[..., Any]:
    def both(*arguments: Any, **more: Any) -> Any:
        first()
        return then(*arguments, **more)

    return both


def siblings() -> list[int]:
    """The other ranks that this process's launcher has started."""
    parent = os.getppid()
    return [
        int(pid)
        for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        if int(pid) != os.getpid()
        and any(name.startswith(b"RANK=") for name in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    ]


# ------------------------------------------------------------------------------------------------------------- outside
def start_anew(command: str, recipe: str, run_dir: Path, kill: Kill | None = None) -> int:
    """As the command line starts a run: new processes."""
    processes = _write(recipe, run_dir)
    arguments = [sys.executable, str(Path(__file__).resolve()), "--as-rank", command, str(run_dir), _json(kill)]
    return run_ranks(arguments, processes, new_attempt(run_dir), rank_environment(count_gpus())).code


def _write(recipe: str, run_dir: Path) -> int:
    """`recipe.yaml` in its place; how many processes it wants."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "recipe.yaml").write_text(recipe)
    processes = load_recipe(run_dir / "recipe.yaml").launch.processes
    assert processes is not None  # `check` has filled it in
    return processes


def _json(kill: Kill | None) -> str:
    return json.dumps(kill and vars(kill))


class Forge:
    """Starts ranks as forks of a process that has imported everything."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--forge"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **rank_environment(0)},
        )

    def __call__(self, command: str, recipe: str, run_dir: Path, kill: Kill | None = None) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        processes = _write(recipe, run_dir)
        print(json.dumps([command, str(run_dir), processes, kill and vars(kill)]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process that ranks are forked from has ended")
        return int(answer)

    def close(self) -> None:
        self._process.communicate()  # it ends with its input


def forge() -> int:
    """Forks the ranks of every start that standard input asks for."""
    from megatron_rl.rollout import environment

    environment.prepare()
    import reasoning_gym  # noqa: F401
    import transformers  # noqa: F401
    from megatron.core import dist_checkpointing, models, optimizer  # noqa: F401
    from vllm import LLM, SamplingParams  # noqa: F401

    from megatron_rl.trainer import loop, main, run, sft  # noqa: F401

    for line in sys.stdin:
        command, run_dir, processes, kill = json.loads(line)
        print(_fork_ranks(command, run_dir, processes, Kill(**kill) if kill else None), flush=True)
    return 0


def _fork_ranks(command: str, run_dir: str, processes: int, kill: Kill | None) -> int:
    attempt = new_attempt(Path(run_dir))
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), ATTEMPT: str(attempt.absolute())}
    world |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    running: list[int] = []
    for rank in reversed(range(processes)):  # rank 0 last: it is the one that kills the others
        pid = os.fork()
        if pid == 0:
            _become(rank, world, attempt, lambda: as_rank(command, run_dir, kill, lambda: running))
        running.append(pid)
    first = 0
    while running:
        pid, status = os.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what the rank has started
        running.remove(pid)
        code = os.waitstatus_to_exitcode(status)
        if code and not first:
            first = code
            for other in running:
                os.kill(other, signal.SIGKILL)
    return 128 - first if first < 0 else first


def _become(rank: int, world: Mapping[str, str], attempt: Path, work: Callable[[], int]) -> None:
    """In a fork: runs the rank, and ends the process."""
    code = 1
    try:
        os.setsid()
        os.environ.update({**world, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        log = os.open(attempt / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = work()
    finally:
        sys.stdout.flush()
        os._exit(code)


def resolved(recipe: Path, overrides: Sequence[str], run_dir: Path, command: str = "train") -> str:
    config = load_recipe(recipe, [*overrides, f"run_dir={run_dir}"])
    return to_yaml(check(config, command=command, machine=Machine(gpus=count_gpus())))


def draw(random_: random.Random, kills: int, steps: int, seconds: Mapping[str, float]) -> list[Kill]:
    """Kills in every part of a step equally often, in random order, at a random moment of a longer phase, from the first step
    to the last but one: where one lets the run get a step further, the next still finds it running.

    Args:
        seconds: how long each point takes.
    """
    parts = [part for _ in range(kills) for part in POINTS][:kills]
    random_.shuffle(parts)
    drawn = []
    for i, part in enumerate(parts):
        point = random_.choice(POINTS[part])
        taken = seconds.get(point, 0.0)
        delay = round(random_.uniform(0, 0.9) * taken, 4) if taken > _SHORT else 0.0
        drawn.append(Kill(point, 1, delay, i * steps // kills))
    return drawn


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
            proof.found.append(_phase(killed))
        elif code == 0:
            proof.missed = len(kills) - len(proof.killed)
            break
        else:
            raise RuntimeError(f"a start ended with {code}; see {killed / 'logs'}")
    proof.differences, proof.compared = differences(straight, killed), compared(straight)
    proof.seconds = time.monotonic() - begin
    return proof


def _phase(run_dir: Path) -> str:
    """Where rank 0 of the last start was, by its heartbeat."""
    attempts = sorted((run_dir / "logs").glob("attempt_*"), key=lambda path: int(path.name.removeprefix("attempt_")))
    beat = heartbeats(heartbeat_folder(attempts[-1]))[0]
    return f"{beat['phase']} of step {beat['step']}"


def differences(want: Path, own: Path) -> list[str]:
    """What is not the same in two finished runs; [] where nothing differs."""
    found = []
    for name in ("metrics.jsonl", "sft/metrics.jsonl"):
        before, after = _rows(want, name), _rows(own, name)
        for a, b in zip(before, after, strict=False):
            found += [
                f"{name}, step {a['step']}: {key}" for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)
            ]
        if len(before) != len(after):
            found.append(f"{name} has {len(after)} rows, not {len(before)}")
    names = {path.name for folder in (want, own) for path in (folder / "samples").glob("*.jsonl")}
    found += [
        f"samples/{name}" for name in sorted(names) if _bytes(want / "samples" / name) != _bytes(own / "samples" / name)
    ]
    last = store.newest(want / "checkpoints")
    if last is None:
        return [*found, "there is no checkpoint to compare"]
    other = own / "checkpoints" / last.name
    if damage := manifest.verify(other):
        return [*found, *damage]
    saved, again = (
        {(piece.name, piece.start): piece.digest for piece in manifest.read_tensors(folder)[1]}
        for folder in (last, other)
    )
    changed = sorted(key for key in saved.keys() | again.keys() if saved.get(key) != again.get(key))
    found += [f"{last.name}: tensor {name} at {list(start)}" for name, start in changed]
    own_facts = ("metrics_bytes", "run")  # of each run folder
    states = [{k: v for k, v in store.read_state(folder).items() if k not in own_facts} for folder in (last, other)]
    if states[0] != states[1]:
        found.append(f"{last.name}/state.json")
    weights = {path.name for path in (want / "export").glob("*.safetensors")}
    found += [
        f"export/{name}" for name in sorted(weights) if _bytes(want / "export" / name) != _bytes(own / "export" / name)
    ]
    return found


def _rows(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    path = run_dir / name  # a run without a warm-up has no sft/
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{k: v for k, v in row.items() if k != "time" and not k.startswith(_CLOCK)} for row in rows]


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def compared(run_dir: Path) -> str:
    """How much there was to compare, for people."""
    last = store.newest(run_dir / "checkpoints")
    pieces = len(manifest.read_tensors(last)[1]) if last else 0
    numbers = sum(len(row) for row in _rows(run_dir))
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe", type=Path, nargs="?", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--presets", default="", help="all, or names with commas between; default: the recipe's own")
    parser.add_argument("--kills", type=int, default=10, help="kills for every preset (default 10)")
    parser.add_argument("--steps", type=int, default=4, help="RL steps of a run (default 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the points")
    parser.add_argument("--out", type=Path, default=Path("runs/prove_resume"), help="folder for the runs and table.md")
    parser.add_argument("--fresh", action="store_true", help="start every rank as a new process")
    parser.add_argument("--as-rank", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--forge", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args(arguments)
    if args.as_rank is not None:
        command, run_dir, kill = args.as_rank
        return as_rank(command, run_dir, Kill(**json.loads(kill)) if kill != "null" else None, siblings)
    if args.forge:
        return forge()
    if args.recipe is None:
        parser.error("which recipe?")
    names = list_presets() if args.presets == "all" else tuple(filter(None, args.presets.split(",")))
    forges = [] if args.fresh or count_gpus() else [Forge(), Forge()]
    try:
        proofs = _prove_all(args, names or ("",), forges or [start_anew])
    finally:
        for each in forges:
            each.close()
    return 1 if any(proof.differences or proof.missed for proof in proofs) else 0


def _prove_all(args: argparse.Namespace, names: Sequence[str], starts: Sequence[Start]) -> list[Proof]:
    shared = [f"trainer.steps={args.steps}", "checkpoint.every=1", "checkpoint.keep=2", *args.overrides]
    if load_recipe(args.recipe, shared).sft.steps:
        warm = _run(starts[0], args.recipe, [*shared, "checkpoint.every=0"], args.out / "warm", "sft")
        shared += [f"model.path={warm / 'export'}", "sft.steps=0"]
    proofs, random_ = [], random.Random(args.seed)
    for name in names:
        overrides, folder = [*shared, *([f"algorithm.preset={name}"] if name else [])], args.out / (name or "recipe")
        straight = _run(starts[0], args.recipe, overrides, folder / "straight")
        kills = draw(random_, args.kills, args.steps, durations(straight))
        proof = prove(args.recipe, overrides, folder, kills, straight, *reversed(starts))
        proof.preset = name or "(the recipe's)"
        proofs.append(proof)
        (args.out / "table.md").write_text(table(proofs))
        print(table([proof]).splitlines()[-1], flush=True)
        for kill, found in zip(proof.killed, proof.found, strict=True):
            print(f"    {kill}: killed in {found}", flush=True)
    return proofs


if __name__ == "__main__":
    sys.exit(main())
