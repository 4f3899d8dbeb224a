"""Proves on a recipe that a killed run, continued, is the run that was never killed: bit for bit.

python tools/prove_resume.py RECIPE [--kills 10] [--presets all|a,b] [--steps 4] [--out DIR] [key=value …]

For every preset: one run without interruption, and one whose processes are all killed with SIGKILL at points drawn at
random (while it generates, rewards, trains, saves, syncs, writes a checkpoint, makes it current) and that is started again
after each. Then metrics (all but times and memory), samples, every tensor of the last checkpoint (weights and optimizer), the
estimator's state and the export are compared. In every run Python's, NumPy's and torch's generators get another random state
at every phase, so that a state which a checkpoint would have to carry shows. Writes `table.md`; ends with 1 where anything
differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint import manifest, store
from megatron_rl.config import check, load_recipe, to_yaml
from megatron_rl.config.checks import Machine, count_gpus
from megatron_rl.config.presets import list_presets
from megatron_rl.runtime.spawn import new_attempt, rank_environment, run_ranks

# Phases of a step, and two of a writer: while it writes, and at the rename that makes a checkpoint current.
POINTS = (
    "generate",
    "reward",
    "estimate",
    "old_log_prob",
    "update",
    "checkpoint",
    "sync",
    "sync_check",
    "write",
    "rename",
)
_CLOCK = ("timing_s/", "perf/", "memory/", "checkpoint/", "reward_overlap/")
_KILLED = 128 + signal.SIGKILL


@dataclass(frozen=True)
class Kill:
    """SIGKILL to every rank, `delay` seconds after the `count`-th time that rank 0 comes to `point` since its start."""

    point: str
    count: int = 1
    delay: float = 0.0

    def __str__(self) -> str:
        return f"{self.point} {self.count} + {self.delay:.2f} s"


@dataclass
class Proof:
    """What came of one preset."""

    preset: str
    killed: list[Kill] = field(default_factory=list)
    missed: int = 0  # kills that came to nothing, because the run was done before
    differences: list[str] = field(default_factory=list)
    seconds: float = 0.0


# --------------------------------------------------------------------------------------------------------- in a rank
def as_rank(run_dir: str, kill: Kill | None) -> int:
    scramble()
    if kill is not None and os.environ["RANK"] == "0":
        arm(kill)
    from megatron_rl.trainer.main import main as run_rank

    return run_rank("train", run_dir, "auto")


def scramble() -> None:
    """Gives every generator of random numbers another state whenever a phase begins: a run may depend on none of them."""
    import numpy as np
    import torch

    from megatron_rl.runtime.progress import PROGRESS

    enter = PROGRESS.enter

    def entered(phase: str) -> None:
        seed = int.from_bytes(os.urandom(4), "little")
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        enter(phase)

    PROGRESS.enter = entered  # type: ignore[method-assign]


def arm(kill: Kill) -> None:
    """Hooks the function that marks the point."""
    seen = 0

    def passing(name: str) -> None:
        nonlocal seen
        seen += name == kill.point
        if name == kill.point and seen == kill.count:
            if kill.delay:
                threading.Timer(kill.delay, _kill_all_ranks).start()
            else:
                _kill_all_ranks()

    from megatron_rl.checkpoint import saver
    from megatron_rl.checkpoint import snapshot as snapshots
    from megatron_rl.runtime.progress import PROGRESS

    if kill.point == "write":
        snapshots.write_share = _after(lambda: passing("write"), snapshots.write_share)
    elif kill.point == "rename":
        saver._replace = _after(lambda: passing("rename"), saver._replace)
    else:
        enter = PROGRESS.enter

        def entered(name: str) -> None:
            passing(name)
            enter(name)

        PROGRESS.enter = entered  # type: ignore[method-assign, assignment]


def _after(first: Callable[[], None], then: Callable[..., Any]) -> Callable[..., Any]:
    def both(*arguments: Any, **more: Any) -> Any:
        first()
        return then(*arguments, **more)

    return both


def _kill_all_ranks() -> None:
    """What a machine that goes down does: nobody gets to do anything more, this process last."""
    parent = os.getppid()
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if int(pid) != os.getpid() and any(name.startswith(b"RANK=") for name in environment):
            os.kill(int(pid), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


# ------------------------------------------------------------------------------------------------------------- outside
def run(recipe: str, run_dir: Path, kill: Kill | None = None) -> int:
    """One start of all ranks, up to the end or the kill; the exit code."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "recipe.yaml").write_text(recipe)
    gpus = count_gpus()
    processes = load_recipe(run_dir / "recipe.yaml").launch.processes
    assert processes is not None  # `check` has filled it in
    command = [sys.executable, str(Path(__file__).resolve()), "--as-rank", str(run_dir)]
    if kill is not None:
        command += ["--kill", json.dumps(vars(kill))]
    return run_ranks(command, processes, new_attempt(run_dir), rank_environment(gpus)).code


def resolved(recipe: Path, overrides: Sequence[str], run_dir: Path) -> str:
    config = load_recipe(recipe, [*overrides, f"run_dir={run_dir}"])
    return to_yaml(check(config, machine=Machine(gpus=count_gpus())))


def draw(random_: random.Random, steps: int) -> Kill:
    return Kill(random_.choice(POINTS), random_.randint(1, max(1, steps // 2)), round(random_.uniform(0, 0.3), 3))


def prove(
    recipe: Path, overrides: Sequence[str], folder: Path, kills: Sequence[Kill], straight: Path | None = None
) -> Proof:
    """Runs it with the kills and compares with a run without, which is made first unless its folder is given.

    Raises:
        RuntimeError: a start failed by itself.
    """
    begin, proof = time.monotonic(), Proof("")
    if straight is None:
        straight = folder / "straight"
        if run(resolved(recipe, overrides, straight), straight) != 0:
            raise RuntimeError(f"the run without interruption failed; see {straight / 'logs'}")
    killed = folder / "killed"
    text = resolved(recipe, overrides, killed)
    for kill in [*kills, None]:
        code = run(text, killed, kill)
        if code == _KILLED and kill is not None:
            proof.killed.append(kill)
        elif code == 0:
            proof.missed = len(kills) - len(proof.killed)
            break
        else:
            raise RuntimeError(f"a start ended with {code}; see {killed / 'logs'}")
    proof.differences = differences(straight, killed)
    proof.seconds = time.monotonic() - begin
    return proof


def differences(want: Path, own: Path) -> list[str]:
    """What is not the same in two finished runs; [] where nothing differs."""
    found = []
    for a, b in zip(_rows(want), _rows(own), strict=False):
        found += [
            f"metrics.jsonl, step {a['step']}: {key}" for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)
        ]
    if len(_rows(want)) != len(_rows(own)):
        found.append(f"metrics.jsonl has {len(_rows(own))} rows, not {len(_rows(want))}")
    names = {path.name for folder in (want, own) for path in (folder / "samples").glob("*.jsonl")}
    found += [
        f"samples/{name}" for name in sorted(names) if _bytes(want / "samples" / name) != _bytes(own / "samples" / name)
    ]
    last = store.newest(want / "checkpoints")
    if last is None:
        return [*found, "there is no checkpoint to compare"]
    other = own / "checkpoints" / last.name
    if damage := manifest.damage(other):
        return [*found, *damage]
    before, after = (
        {(piece.name, piece.start): piece.digest for piece in manifest.read_tensors(folder)[1]}
        for folder in (last, other)
    )
    changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    found += [f"{last.name}: tensor {name} at {list(start)}" for name, start in changed]
    states = [{k: v for k, v in store.read_state(folder).items() if k != "metrics_bytes"} for folder in (last, other)]
    if states[0] != states[1]:
        found.append(f"{last.name}/state.json")
    weights = {path.name for path in (want / "export").glob("*.safetensors")}
    found += [
        f"export/{name}" for name in sorted(weights) if _bytes(want / "export" / name) != _bytes(own / "export" / name)
    ]
    return found


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "time" and not k.startswith(_CLOCK)} for row in rows]


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def table(proofs: Sequence[Proof]) -> str:
    lines = ["| preset | kills | at | differences | s |", "|---|---|---|---|---|"]
    for proof in proofs:
        points = ", ".join(map(str, proof.killed))
        what = "; ".join(proof.differences[:3]) or "none"
        lines.append(f"| `{proof.preset}` | {len(proof.killed)} | {points} | {what} | {proof.seconds:.0f} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe", type=Path, nargs="?", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--presets", default="", help="all, or names with commas between; default: the recipe's own")
    parser.add_argument("--kills", type=int, default=10, help="kills for every preset (default 10)")
    parser.add_argument("--steps", type=int, default=4, help="RL steps of a run (default 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the points")
    parser.add_argument("--out", type=Path, default=Path("runs/prove_resume"), help="folder for the runs and table.md")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    parser.add_argument("--kill", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args(arguments)
    if args.as_rank is not None:
        return as_rank(args.as_rank, Kill(**args.kill) if args.kill else None)
    if args.recipe is None:
        parser.error("which recipe?")
    names = list_presets() if args.presets == "all" else tuple(filter(None, args.presets.split(",")))
    proofs, random_ = [], random.Random(args.seed)
    for name in names or ("",):
        overrides = [f"trainer.steps={args.steps}", "checkpoint.every=1", "checkpoint.keep=2", *args.overrides]
        overrides += [f"algorithm.preset={name}"] if name else []
        kills = [draw(random_, args.steps) for _ in range(args.kills)]
        proof = prove(args.recipe, overrides, args.out / (name or "recipe"), kills)
        proof.preset = name or "(the recipe's)"
        proofs.append(proof)
        (args.out / "table.md").write_text(table(proofs))
        print(table([proof]).splitlines()[-1], flush=True)
    return 1 if any(proof.differences for proof in proofs) else 0


if __name__ == "__main__":
    sys.exit(main())
