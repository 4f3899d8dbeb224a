"""The quick start's step beside TRL's, and estimators beside verl's: make bench-peers [ARGS="--steps 6 --rounds 2"]

From the same weights (the quick start's after its warm-up, made here unless --model names them), on the same prompts, with
the same rewards, on two cores: ours in each layout and TRL take turns, `--rounds` times. Medians over all steps but a run's
first; generated tokens per second of whole steps, because the responses' lengths drift apart as the two learn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.others import told

PEERS = Path(".venv-peers/bin/python")
RECIPE = "recipes/cpu/quickstart.yaml"
LAYOUTS = {  # (processes, tensor parallel): the threads that are left to each process of two cores
    "ours, 1 process of 2 threads": (1, 1, 2),
    "ours, data parallel 2": (2, 1, 1),
    "ours, tensor parallel 2": (2, 2, 1),
}


def run(command: Sequence[str], threads: int) -> str:
    """What it prints.

    Raises:
        SystemExit: it failed.
    """
    # Threads that wait sleep, as they do by default in ours: those that spin keep others from the core that they wait for.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def train(command: str, run_dir: Path, threads: int, *overrides: str) -> None:
    program = str(Path(sys.executable).with_name("megatron-rl"))
    run([program, command, RECIPE, f"run_dir={run_dir}", "checkpoint.every=0", *overrides], threads)


def ours(folder: Path, model: Path, steps: int, layout: tuple[int, int, int]) -> tuple[list[float], list[float]]:
    """Seconds and generated tokens of each step; leaves the prompts in `prompts.jsonl` of `folder`."""
    processes, tensor, threads = layout
    parallel = (f"launch.processes={processes}", f"actor.parallel.tensor={tensor}", f"rollout.tensor_parallel={tensor}")
    start = ("model.create=null", f"model.path={model}", "sft.steps=0", f"trainer.steps={steps}")
    with tempfile.TemporaryDirectory(dir=folder) as made:
        run_dir = Path(made) / "run"
        train("train", run_dir, threads, *start, *parallel, "trainer.eval_every=0", "logging.samples_per_step=512")
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        prompts = []
        for step in range(1, steps + 1):
            samples = (run_dir / f"samples/step_{step}.jsonl").read_text(encoding="utf-8").splitlines()
            seen = {row["sample"]: row for row in map(json.loads, samples)}
            prompts += [json.dumps({"prompt": row["prompt"], "answer": row["answer"]}) for row in seen.values()]
    (folder / "prompts.jsonl").write_text("\n".join(prompts) + "\n", encoding="utf-8")
    rows = [row for row in rows if "timing_s/step" in row]
    return [row["timing_s/step"] for row in rows], [512 * row["response_length/mean"] for row in rows]


def trl(folder: Path, model: Path, steps: int, threads: int) -> tuple[list[float], list[float]]:
    command = [str(PEERS), "benchmarks/peers/trl_steps.py", str(model), str(folder / "prompts.jsonl"), str(steps)]
    found = json.loads(run(command, threads).splitlines()[-1])
    return found["seconds"], found["tokens"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="Hugging Face folder; the quick start's after its warm-up")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args(arguments)
    console = Console()
    seconds: dict[str, list[float]] = {}
    tokens: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = args.model
        if model is None:
            console.print("warm-up of the quick start's model: a minute")
            train("sft", folder / "sft", 1)
            model = folder / "sft" / "export"
        for _ in range(args.rounds):
            for name, layout in LAYOUTS.items():
                taken, made_tokens = ours(folder, model, args.steps, layout)
                seconds.setdefault(name, []).extend(taken[1:])
                tokens.setdefault(name, []).extend(made_tokens[1:])
            taken, made_tokens = trl(folder, model, args.steps, 2)
            seconds.setdefault("TRL, 1 process of 2 threads", []).extend(taken[1:])
            tokens.setdefault("TRL, 1 process of 2 threads", []).extend(made_tokens[1:])
    rates = {name: sum(tokens[name]) / sum(taken) for name, taken in seconds.items()}
    table = Table("", "step s", "least", "most", "tokens a step", "tokens/s", "of TRL's")
    for name, taken in seconds.items():
        cells = [f"{median(taken):.2f}", f"{min(taken):.2f}", f"{max(taken):.2f}", f"{median(tokens[name]):,.0f}"]
        table.add_row(name, *cells, f"{rates[name]:,.0f}", f"{rates[name] / rates['TRL, 1 process of 2 threads']:.2f}")
    console.print(table)
    estimators = json.loads(run([str(PEERS), "-m", "benchmarks.peers.verl_estimators"], 1).splitlines()[-1])
    table = Table(
        "estimator, 65,536 rollouts", "ours ms", "verl's loops", "times ours", "verl's vectorised", "times ours"
    )
    for name, found in estimators.items():
        cells = [f"{found['ours'] * 1e3:.1f}"]
        for kind in ("loops", "vectorised"):
            cells += [f"{found[kind] * 1e3:.0f}", f"{found[kind] / found['ours']:.1f}"] if kind in found else ["", ""]
        table.add_row(name, *cells)
    console.print(table)
    return 0


if __name__ == "__main__":
    with told():
        sys.exit(main())
