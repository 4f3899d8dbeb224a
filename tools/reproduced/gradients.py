"""Baselines and gradients of small batches against the true ones, on a saved checkpoint (shrinkage, appendices B and C.2).

As the paper does it: 256 rollouts of 128 prompts give each prompt's value and the true gradient; batches of 64 prompts and
2, 4 or 8 rollouts are taken out of them. The gradients are the actor's own, as an update has them.

python -m reproduced.gradients RUN STEP FILE    # of the run folder's checkpoint; with tools/ in PYTHONPATH
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms import Algorithm, RewardTable, make_algorithm
from megatron_rl.config import Config, Machine, check, load_recipe
from megatron_rl.config.machine import count_gpus
from megatron_rl.data.rollout import Rollouts
from megatron_rl.data.sample import Sample
from megatron_rl.models import read_hf_config
from megatron_rl.runtime import distributed
from megatron_rl.seams.megatron import MAIN_GRADIENT
from megatron_rl.trainer.run import Run, build_run
from reproduced.claims import Numbers
from reproduced.page import markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOOLS = Path(__file__).resolve().parents[1]
PROMPTS, ROLLOUTS, BATCH, BATCHES = 128, 256, 64, 20
COUNTS = (2, 4, 8)  # rollouts a prompt of a small batch
LAMBDAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # at `GRID_COUNT` rollouts
GRID_COUNT = 4
KINDS = ("sums", "larger", "mixed")
WHEN = {0: "before RL", 30: "after RL"}  # step of a checkpoint
BASELINES: dict[str, tuple[str, dict[str, object]]] = {
    "RLOO": ("rloo", {}),
    "REINFORCE++ (batch mean)": ("reinforce_pp", {"normalize": False}),
    "ReMax": ("remax", {}),
    "shrinkage": ("shrinkage", {}),
}
ERROR, DISTANCE, LESS = "error of the baseline", "distance to the gradient", "less than RLOO's"


@dataclass(frozen=True)
class Drawn:
    """What was drawn for some prompts.

    Attributes:
        rollouts: `ROLLOUTS` of each.
        greedy: one greedy rollout of each.
        values: mean reward of each, float64 [prompts].
    """

    rollouts: Rollouts
    greedy: Rollouts
    values: Tensor


def draw(run: Run, samples: Sequence[Sample]) -> Drawn:
    """Rollouts of these prompts by the run's engine, scored."""
    sampler = run.sampler
    rollouts = sampler.scored_groups(samples, step=1)
    greedy = sampler.sample_greedily(samples, step=1)
    return Drawn(rollouts, greedy, sampler.reward_table(rollouts).values.sum(-1).mean(1))


def batch_of(drawn: Drawn, prompts: Sequence[int], chosen: np.ndarray) -> Drawn:
    """A batch out of what was drawn: of each of `prompts` the rollouts `chosen`, int64 [prompts, count]."""
    whole, count = drawn.rollouts, chosen.shape[1]
    rows = (np.asarray(prompts)[:, None] * whole.count + chosen).ravel()
    facts = whole.facts[rows].copy()
    facts["row"] = np.arange(len(rows))
    rollouts = replace(
        whole,
        samples=[whole.samples[i] for i in prompts],
        count=count,
        facts=facts,
        held={new: whole.held[int(old)] for new, old in enumerate(rows)},
        rewards=whole.rewards[rows],
    )
    greedy = replace(drawn.greedy, rewards=drawn.greedy.rewards[list(prompts)])
    return Drawn(rollouts, greedy, drawn.values[list(prompts)])


class Gradients:
    """The actor's gradients of batches of rollouts, under the weights that drew them."""

    def __init__(self, run: Run) -> None:
        self._run, self._own = run, run.learner.algorithm

    def algorithm(self, estimator: str, params: Mapping[str, object]) -> Algorithm:
        """The recipe's algorithm with another estimator."""
        config = self._run.config.algorithm
        estimator_config = replace(config.estimator, name=estimator, params=dict(params))
        return make_algorithm(
            replace(config, estimator=estimator_config), max_tokens=self._run.config.rollout.max_tokens
        )

    def of(self, batch: Drawn, estimator: str, params: Mapping[str, object]) -> tuple[Tensor, Tensor]:
        """The gradient, float64 [parameters], and the advantages, float64 [prompts, count]."""
        learner = self._run.learner
        learner.algorithm = self.algorithm(estimator, params)
        table = self._run.sampler.reward_table(batch.rollouts, batch.greedy)
        estimate = learner.algorithm.compute_advantages(table, truncated=batch.rollouts.truncated)
        learner.update(learner.train_batch(batch.rollouts, estimate), estimate.clip_range)
        learner.algorithm = self._own
        parameters = (parameter for chunk in learner.actor.ddp_chunks for parameter in chunk.parameters())
        gradient = torch.cat([getattr(parameter, MAIN_GRADIENT).flatten() for parameter in parameters])
        return gradient.double().clone(), estimate.advantages


def baseline_error(table: RewardTable, advantages: Tensor, values: Tensor) -> float:
    """Mean squared error of the baseline, reward - advantage, against the prompts' values."""
    return float((table.values.sum(-1) - advantages - values[:, None]).square().mean())


def measure(run: Run, step: int) -> dict[str, dict[str, float]]:
    """Line -> measure -> mean over the small batches, of the checkpoint of a step."""
    gradients = Gradients(run)
    by_kind = {kind: [sample for sample in run.sampler.prompts.train if sample.task == kind] for kind in KINDS[:2]}
    half = PROMPTS // 2
    prompts = {kind: samples[:PROMPTS] for kind, samples in by_kind.items()}
    prompts["mixed"] = [*by_kind["sums"][:half], *by_kind["larger"][:half]]
    drawn = {kind: draw(run, samples) for kind, samples in prompts.items() if [*_lines(kind, step)]}
    run.hand_device_to_actor()
    found: dict[str, dict[str, float]] = {}
    for kind, everything in drawn.items():
        truth, _ = gradients.of(everything, "rloo", {})
        for count, lines in _lines(kind, step):
            batches = [
                batch_of(everything, which, chosen)
                for which, chosen in small_batches(len(prompts[kind]), count, run.config.seed)
            ]
            for line, estimator, params in lines:
                errors, distances = [], []
                for batch in batches:
                    gradient, advantages = gradients.of(batch, estimator, params)
                    distances.append(float((gradient - truth).square().sum()))
                    table = run.sampler.reward_table(batch.rollouts)
                    errors.append(baseline_error(table, advantages, batch.values))
                found[line] = {ERROR: fmean(errors), DISTANCE: fmean(distances)}
    found |= {line: found[line] | {LESS: less} for line, less in _less(found)}
    return {line_at(step, line): numbers for line, numbers in found.items()}


def small_batches(prompts: int, count: int, seed: int) -> Iterator[tuple[list[int], np.ndarray]]:
    """Prompts of each small batch, and which of their rollouts, int64 [prompts, count]; the same for every estimator."""
    generator = np.random.default_rng([seed, count])
    for _ in range(BATCHES):
        which = generator.choice(prompts, BATCH, replace=False).tolist()
        yield which, np.stack([generator.choice(ROLLOUTS, count, replace=False) for _ in which])


def _lines(kind: str, step: int) -> Iterator[tuple[int, list[tuple[str, str, dict[str, object]]]]]:
    """Rollouts a prompt, with the lines that are measured on the same batches: name, estimator and its parameters."""
    if kind == "sums":
        for count in COUNTS:
            yield count, [(f"{label}, {count} rollouts", *each) for label, each in BASELINES.items()]
    if step == 0:
        yield GRID_COUNT, [(grid_line(kind, value), "shrinkage", {"weight": value}) for value in LAMBDAS]


def line_at(step: int, line: str) -> str:
    """A line's name among those of all checkpoints."""
    return f"step {step}: {line}"


def lines_at(step: int) -> list[str]:
    """Names of all lines that are measured at a checkpoint: the grid of lambdas at the first only."""
    return [line_at(step, name) for kind in KINDS for _, lines in _lines(kind, step) for name, _, _ in lines]


def grid_line(kind: str, value: float) -> str:
    return f"lambda {value:.1f}, {kind}"


def _less(found: Mapping[str, Mapping[str, float]]) -> Iterator[tuple[str, float]]:
    """By what share a line's distance to the gradient is below RLOO's on the same batches, where that is compared."""
    for count in COUNTS:
        yield f"shrinkage, {count} rollouts", _share(found, f"shrinkage, {count} rollouts", f"RLOO, {count} rollouts")
    for kind in KINDS if grid_line("mixed", 0.4) in found else ():
        yield grid_line(kind, 0.4), _share(found, grid_line(kind, 0.4), grid_line(kind, 0.0))


def _share(found: Mapping[str, Mapping[str, float]], line: str, of: str) -> float:
    return 1 - found[line][DISTANCE] / found[of][DISTANCE]


def study(run_dir: Path, step: int, folder: Path) -> dict[str, dict[str, float]]:
    """Measures a checkpoint of a run on this process alone; `folder` is where it may write."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    checkpoint = run_dir / "checkpoints" / f"step_{step}"
    overrides: list[Any] = [
        "model.create=null",
        f"model.path={checkpoint}",
        f"run_dir={folder}",
        "sft.steps=0",
        f"trainer.prompts_per_step={PROMPTS}",
        f"rollout.group_size={ROLLOUTS}",
        "actor.optimizer.lr=1.0e-30",  # changes no weight
        "actor.optimizer.warmup_steps=0",
    ]
    machine = Machine(gpus=count_gpus(), world_size=1, local_world_size=1)
    config: Config = check(
        load_recipe(run_dir / "recipe.yaml", overrides), machine=machine, model=read_hf_config(checkpoint)
    )
    grid = distributed.initialize(config.actor.parallel, timeout_minutes=10.0)
    run = build_run(config, grid, folder)
    run.learner.start()
    run.start_engine()
    found = measure(run, step)
    run.close()
    return found


def measure_all(runs: Sequence[Path], steps: Sequence[int], at_once: int) -> dict[str, dict[str, list[float]]]:
    """Line -> measure -> a number per run: each checkpoint measured by a process of its own, `at_once` at a time."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as pool:
        files = {
            (run, step): Path(folder) / f"{number}_{step}.json" for number, run in enumerate(runs) for step in steps
        }
        [*pool.map(_measure_apart, files, files.values())]
        of_runs = [
            {k: v for step in steps for k, v in json.loads(files[run, step].read_text()).items()} for run in runs
        ]
    return {
        line: {measure: [of_run[line][measure] for of_run in of_runs] for measure in measures}
        for line, measures in of_runs[0].items()
    }


def _measure_apart(checkpoint: tuple[Path, int], file: Path) -> None:
    run, step = checkpoint
    print(f"--- measuring step {step} of {run}", flush=True)
    words = [sys.executable, "-m", "reproduced.gradients", str(run), str(step), str(file)]
    log = file.with_suffix(".log")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (TOOLS, TOOLS.parent)))}
    with log.open("w") as output:
        done = subprocess.run(words, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}\n{log.read_text()[-2000:]}")


def tables(numbers: Numbers) -> str:
    """Figures 9, 10 and 12 as tables: means over the runs."""

    def mean(step: int, line: str, measure: str) -> float:
        return fmean(numbers[line_at(step, line)][measure])

    blocks = []
    for figure, measure in ((9, ERROR), (10, DISTANCE)):
        header = (
            f"{measure} (Fig. {figure})",
            *(f"{when}, {count} rollouts" for when in WHEN.values() for count in COUNTS),
        )
        rows = [
            [label, *(mean(step, f"{label}, {count} rollouts", measure) for step in WHEN for count in COUNTS)]
            for label in BASELINES
        ]
        blocks.append(markdown_table(header, rows))
    header = ("distance by lambda, before RL (Fig. 12)", *(f"{value:.1f}" for value in LAMBDAS))
    grid = [[kind, *(mean(0, grid_line(kind, value), DISTANCE) for value in LAMBDAS)] for kind in KINDS]
    return "\n\n".join([*blocks, markdown_table(header, grid)])


def draw_grid(figure: Figure, numbers: Numbers) -> None:
    """The distance to the gradient by lambda, of each kind of prompts relative to lambda 0: a line per run."""
    panels = figure.subplots(1, len(KINDS), sharey=True, squeeze=False)[0]
    for axes, kind in zip(panels, KINDS, strict=True):
        lines = [numbers[line_at(0, grid_line(kind, value))][DISTANCE] for value in LAMBDAS]
        for run in range(len(lines[0])):
            axes.plot(LAMBDAS, [line[run] / lines[0][run] for line in lines], "o-", alpha=0.5)
        axes.set(title=kind, xlabel="lambda")
    panels[0].set_ylabel("distance to the gradient, over RLOO's")


def main(arguments: Sequence[str]) -> int:
    run_dir, step, file = arguments
    with tempfile.TemporaryDirectory() as folder:
        found = study(Path(run_dir), int(step), Path(folder))
    Path(file).write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
