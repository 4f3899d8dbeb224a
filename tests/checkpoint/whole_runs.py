"""What ranks do in test_runs: whole runs without an engine, stopped and continued, or started from another's checkpoint."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_rl.checkpoint import manifest
from megatron_rl.checkpoint.store import CheckpointError
from megatron_rl.config import Config, check, load_recipe
from megatron_rl.config.machine import Machine
from megatron_rl.data.rewards import RewardTable
from megatron_rl.runtime import distributed
from megatron_rl.runtime.stop import StopRequested
from megatron_rl.trainer.evaluate import evaluate_only
from megatron_rl.trainer.loop import train
from megatron_rl.trainer.rank.program import agree
from megatron_rl.trainer.run import Run, build_run
from megatron_rl.trainer.sft import sft, warm_up
from megatron_rl.trainer.state import State
from tests.checkpoint.ranks import Layout, close

STEPS, STOPPED = 6, 3


class _StopsAfter:
    """What a signal does that comes in step `step`."""

    def __init__(self, step: int) -> None:
        self._left = step

    def check(self, grid: distributed.ProcessGrid) -> None:
        self._left -= 1
        if self._left < 0:
            raise StopRequested(signal.SIGTERM)


def start(root: Path, name: str, layout: Layout, *overrides: str, command: str = "sft") -> Run:
    """A run in `root/name` by `root/recipe.yaml`, as far as one is built before it begins."""
    kind = f"{{distributed: {str(layout.distributed).lower()}}}"
    own = [f"actor.parallel={{tensor: {layout.tensor}, pipeline: {layout.pipeline}}}", f"actor.optimizer={kind}"]
    config: Config = load_recipe(
        root / "recipe.yaml", [f"run_dir={root / name}", *own, f"sft.optimizer={kind}", *overrides]
    )
    config = check(config, command=command, machine=Machine(gpus=0))
    grid = distributed.initialize(config.actor.parallel, timeout_minutes=5)
    return build_run(config, grid, Path(config.run_dir), command)


def end(run: Run) -> None:
    run.close()
    close()


def run_in_every_way(root_: str, layouts: list[Layout]) -> None:
    """An SFT run without a stop; one that is stopped, and continued at each of the layouts; and what the functions below
    do."""
    root, before = Path(root_), layouts[0]
    run = start(root, "straight", before)
    sft(run, "auto")
    end(run)
    run = start(root, "stopped", before)
    run.stop = _StopsAfter(STOPPED)  # type: ignore[assignment]
    try:
        sft(run, "auto")
    except StopRequested:
        end(run)
    for layout in layouts:
        if int(torch.distributed.get_rank()) == 0:
            shutil.copytree(root / "stopped", root / layout.name)
        torch.distributed.barrier()
        run = start(root, layout.name, layout)
        sft(run, "auto")
        end(run)
    _begin_anew(root, Layout(pipeline=2))
    _export_without_room(root, before)
    _newest_damaged(root, before)
    _none_whole(root, before)
    _warm_ups(root, before)
    _estimator_state(root, before)
    _different_recipes(root, before)
    _reference_from_elsewhere(root, before)


def _begin_anew(root: Path, layout: Layout) -> None:
    """A checkpoint as another run's model, and as what a run with another estimator is asked to continue."""
    folder, facts = root / "straight" / "checkpoints" / f"step_{STEPS}", {}
    run = start(root, "anew", layout, f"model.path={folder}", "algorithm.preset=rloo")
    facts["weights"] = dict(run.learner.actor.iter_hf_weights())
    facts["step"] = run.state.step
    end(run)
    run = start(root, "continued", layout, "algorithm.preset=rloo")
    try:
        run.resume(str(folder), run.config.sft.optimizer, STEPS)
    except CheckpointError as error:
        facts["refusal"] = str(error)
    end(run)
    if int(torch.distributed.get_rank()) == 0:
        torch.save(facts, root / "anew.pt")


def _export_without_room(root: Path, layout: Layout) -> None:
    """All steps done and saved, but no export: there is no room for it, and then there is."""
    run = start(root, "full", layout, "trainer.steps=1", command="train")
    run.learner.actor.start_optimizer(run.config.actor.optimizer, 1)
    run.state = State(step=1)
    run.checkpoints.save(run.state)
    run.checkpoints.finish()
    end(run)
    facts: dict[str, Any] = {}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (20_000, limits[0]):
        run = start(root, "full", layout, "trainer.steps=1", command="train")
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            train(run, "auto")
        except CheckpointError as error:
            facts["error"] = str(error)
            facts["left"] = sorted(path.name for path in (root / "full").glob("*export*"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        end(run)
        torch.distributed.barrier()
    torch.save(facts, root / f"full_{torch.distributed.get_rank()}.pt")


def _newest_damaged(root: Path, layout: Layout) -> None:
    """Of two checkpoints the newer is damaged, and one is to be kept: a batch job continues and is stopped one step later.
    Then what its requeue makes of `--resume never`, and another job; and an evaluation of the damaged one."""
    facts: dict[str, Any] = {}
    damaged = root / "damaged" / "checkpoints" / f"step_{STEPS}"
    if int(torch.distributed.get_rank()) == 0:
        shutil.copytree(root / "straight", root / "damaged")
        piece = next(p for p in manifest.read_tensors(damaged)[1] if p.name == "embedding.word_embeddings.weight")
        with (damaged / piece.file).open("r+b") as file:
            file.seek(piece.offset + piece.length // 2)
            file.write(b"\x55\xaa")
    torch.distributed.barrier()
    run = start(root, "damaged", layout)
    try:
        evaluate_only(run, str(damaged))
    except CheckpointError as error:
        facts["evaluation"] = str(error)
    end(run)
    os.environ["SLURM_JOB_ID"] = "7"
    run = start(root, "damaged", layout, "checkpoint.keep=1")
    run.stop = _StopsAfter(1)  # type: ignore[assignment]
    try:
        sft(run, "auto")
    except StopRequested:
        end(run)
    os.environ["SLURM_RESTART_COUNT"] = "1"
    run = start(root, "damaged", layout)
    facts["requeued"] = run.resume("never", run.config.sft.optimizer, STEPS) and run.state.step
    end(run)
    os.environ["SLURM_JOB_ID"] = "8"
    run = start(root, "damaged", layout)
    facts["another"] = run.resume("never", run.config.sft.optimizer, STEPS)
    end(run)
    del os.environ["SLURM_JOB_ID"], os.environ["SLURM_RESTART_COUNT"]
    torch.save(facts, root / f"damaged_{torch.distributed.get_rank()}.pt")


def _alone(work: Callable[[], Any]) -> None:
    """Rank 0 does it, and the others wait."""
    if int(torch.distributed.get_rank()) == 0:
        work()
    torch.distributed.barrier()


def _none_whole(root: Path, layout: Layout) -> None:
    """All checkpoints of a run are damaged; and then one of them is whole, but lies where another one's place is, and one is
    another run's."""
    facts: dict[str, Any] = {}
    checkpoints = root / "refused" / "checkpoints"

    def tried(name: str, *overrides: str) -> None:
        run = start(root, "refused", layout, *overrides)
        try:
            run.resume("auto", run.config.sft.optimizer, STEPS)
            facts[name] = run.state.step
        except CheckpointError as error:
            facts[name] = str(error)
        end(run)

    def cut() -> None:
        shutil.copytree(root / "straight", root / "refused")
        for folder in checkpoints.glob("step_*"):
            os.truncate(folder / "common.pt", 1)

    _alone(cut)
    tried("damaged")
    facts["left"] = sorted(path.name for path in (root / "refused").iterdir())
    _alone(lambda: shutil.copytree(root / "straight" / "checkpoints" / f"step_{STEPS}", checkpoints / "step_5"))
    tried("misplaced")
    _alone(lambda: shutil.rmtree(checkpoints))
    _alone(lambda: shutil.copytree(root / "straight" / "checkpoints", checkpoints))
    _alone(lambda: (root / "refused" / "run_id").write_text("0123456789abcdef"))
    tried("another run")
    _alone(lambda: (root / "refused" / "run_id").unlink())
    tried("adopted")
    tried("another tokenizer", "model.create.words=['12']")
    torch.save(facts, root / f"refused_{torch.distributed.get_rank()}.pt")


def _warm_ups(root: Path, layout: Layout) -> None:
    """The SFT steps before RL: without a stop; stopped twice and continued, once from a checkpoint before the last step that
    was done; and what a recipe with fewer such steps is told."""
    every = ("checkpoint.sft_every=2", "checkpoint.keep=9")
    facts: dict[str, Any] = {"continued": []}

    def warmed_up(name: str, stop: int | None, *overrides: str) -> None:
        run = start(root, name, layout, *every, *overrides, command="train")
        if stop is not None:
            run.stop = _StopsAfter(stop)  # type: ignore[assignment]
        try:
            run.resume("auto", run.config.actor.optimizer, 1)
            facts["continued"].append(run.state.warm_up)
            warm_up(run)
            facts[name] = run.state.warming_up
        except StopRequested:
            pass
        end(run)

    warmed_up("warm", None)
    warmed_up("warm in parts", STOPPED)
    _alone(lambda: shutil.rmtree(root / "warm in parts" / "sft" / "checkpoints" / f"step_{STOPPED}"))
    warmed_up("warm in parts", 2)  # which does step 3 again, and is stopped before step 5
    run = start(root, "warm in parts", layout, "sft.steps=3", command="train")
    try:
        run.resume("auto", run.config.actor.optimizer, 1)
    except CheckpointError as error:
        facts["fewer"] = str(error)
    end(run)
    warmed_up("warm in parts", None)
    run = start(root, "warm", layout, command="train")
    run.learner.actor.start_optimizer(run.config.actor.optimizer, 1)
    run.checkpoints.save(run.state)  # RL's first
    run.checkpoints.finish()
    end(run)
    facts["sft"] = sorted(path.name for path in (root / "warm" / "sft").iterdir())
    torch.save(facts, root / f"warm_{torch.distributed.get_rank()}.pt")


def _estimator_state(root: Path, layout: Layout) -> None:
    """AWPO on a batch whose best group has the mean 0.75, after one whose best has 1.5: in the run that saw both, in one that
    was continued in between, and in one that saw the second only."""
    awpo = ("algorithm.preset=awpo", "trainer.steps=9", "trainer.minibatches=2")
    first, second = _rewards(1.5), _rewards(0.75)
    facts: dict[str, Any] = {}

    def estimated(run: Run) -> torch.Tensor:
        return run.learner.algorithm.compute_advantages(second).advantages

    run = start(root, "awpo", layout, *awpo, command="train")
    run.resume("auto", run.config.actor.optimizer, 18)
    facts["fresh state"] = run.learner.algorithm.state_dict()
    facts["second only"] = estimated(run)
    end(run)
    run = start(root, "awpo", layout, *awpo, command="train")
    run.learner.algorithm.compute_advantages(first)
    facts["state"] = run.learner.algorithm.state_dict()
    run.learner.actor.start_optimizer(run.config.actor.optimizer, 18)
    run.learner.actor.optimizer_steps, run.state = 6, State(step=3, position=25)
    run.checkpoints.save(run.state)
    run.checkpoints.finish()
    facts["both"] = estimated(run)
    end(run)
    run = start(root, "awpo", layout, *awpo, command="train")
    run.resume("auto", run.config.actor.optimizer, 18)
    facts["resumed state"] = run.learner.algorithm.state_dict()
    facts["progress"] = (run.state.step, run.state.position, run.learner.actor.optimizer_steps)
    facts["continued"] = estimated(run)
    end(run)
    torch.save(facts, root / f"awpo_{torch.distributed.get_rank()}.pt")


def _different_recipes(root: Path, layout: Layout) -> None:
    """Ranks whose commands have resolved other recipes, and the same."""
    config = load_recipe(root / "recipe.yaml", [f"run_dir={root / 'unlike'}"])
    grid = distributed.initialize(config.actor.parallel, timeout_minutes=5)
    agree(config, grid)
    config.sft.batch_size += grid.rank
    error = None
    try:
        agree(config, grid)
    except ValueError as refusal:
        error = str(refusal)
    close()
    torch.save(error, root / f"unlike_{grid.rank}.pt")


def _rewards(best: float) -> RewardTable:
    """Three groups of four rollouts; `best` is the highest mean outcome."""
    outcome = torch.tensor([[0.0, 0.1, 0.0, 0.1], [0.2, 0.4, 0.0, 0.2], [best - 0.2, best + 0.2, best, best]])
    judge = torch.tensor([[0.5, 0.1, 0.3, 0.9], [0.1, 0.2, 0.9, 0.4], [0.9, 0.2, 0.4, 0.8]])
    return RewardTable(torch.stack([outcome, judge], dim=-1).double(), ("correct", "judge"))


def _reference_from_elsewhere(root: Path, layout: Layout) -> None:
    """A run with a reference policy, which is neither the model that it began with (it had a warm-up) nor the one that it has
    saved, continued from its checkpoint in another run folder, and then in that one."""
    kl, facts = ("algorithm.kl.coef=0.01", "trainer.steps=2"), {}

    def learn(run: Run) -> None:
        for chunk in run.learner.actor.chunks:
            for parameter in chunk.parameters():
                parameter.data.add_(0.01)

    def weights(run: Run) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in run.learner.actor.iter_hf_weights()}

    run = start(root, "here", layout, *kl, command="train")
    facts["at first"] = weights(run)
    learn(run)
    run.learner.actor.keep_reference()
    facts["reference"] = weights(run)
    learn(run)
    facts["saved"] = weights(run)
    run.learner.actor.start_optimizer(run.config.actor.optimizer, 2)
    run.state = State(step=1)
    run.checkpoints.save(run.state)
    run.checkpoints.finish()
    end(run)
    for name, resume in (("there", str(root / "here" / "checkpoints" / "step_1")), ("there", "auto")):
        run = start(root, name, layout, *kl, command="train")
        run.resume(resume, run.config.actor.optimizer, 2)
        kind = "here's" if resume != "auto" else "its own"
        facts[f"continued from {kind}"] = weights(run)
        with run.learner.actor.as_reference():
            facts[f"reference from {kind}"] = weights(run)
        if resume != "auto":
            run.state = State(step=2)
            run.checkpoints.save(run.state)
            run.checkpoints.finish()
        end(run)
    torch.save(facts, root / f"reference_{torch.distributed.get_rank()}.pt")
