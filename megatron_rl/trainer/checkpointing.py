"""What a run puts into a checkpoint, how it finds one to continue from, and the final export."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import megatron_rl
from megatron_rl.checkpoint import store
from megatron_rl.checkpoint.store import CheckpointError
from megatron_rl.config.schema import OptimizerConfig
from megatron_rl.models import export_hf
from megatron_rl.runtime import device
from megatron_rl.trainer.context import Run, State


def save_checkpoint(run: Run) -> None:
    """`checkpoints/step_<n>`: weights, optimizer, schedule, estimator, data position. Randomness needs no state: every
    seed is a function of the recipe's seed and the step."""
    run.report.phase("saving a checkpoint")
    root = run.run_dir / "checkpoints"
    state = {
        "version": megatron_rl.__version__,
        "command": run.report.command,
        "progress": asdict(run.state),
        "optimizer_steps": run.actor.optimizer_steps,
        "algorithm": run.algorithm.state_dict(),
    }
    store.save(root, run.state.step, run.actor.chunks, run.actor.optimizer, state, run.grid)
    if run.actor.reference is not None:
        _save_reference(run)
    if run.grid.is_main:
        store.keep_newest(root, run.config.checkpoint.keep)


def save_before_end(run: Run) -> None:
    """What a run that is asked to stop leaves behind: a checkpoint of the last whole step, if there is none yet and the
    recipe has checkpoints at all."""
    folder = run.run_dir / "checkpoints" / f"step_{run.state.step}"
    saved = run.grid.broadcast(run.grid.is_main and store.whole(folder) is None)
    if run.config.checkpoint.every and not saved:
        save_checkpoint(run)


def load_checkpoint(run: Run, resume: str, optimizer: OptimizerConfig, total_updates: int) -> bool:
    """Continues from a checkpoint: `auto` the newest whole one of this run, a path that one, `never` none.

    Returns whether there was one. Checkpoints that are not whole are named and passed over.

    Raises:
        CheckpointError: a given path that is no whole checkpoint, or one of another command or estimator.
    """
    folder = run.grid.broadcast(_choose(run, resume) if run.grid.is_main else None)
    if folder is None:
        if run.grid.is_main:
            run.report.start_over()
        return False
    run.report.phase(f"loading {folder.name}")
    state = store.read_state(folder)
    if state["command"] != run.report.command:
        raise CheckpointError(
            f"{folder} was written by `megatron-rl {state['command']}`; give this run another run_dir, or --resume never"
        )
    if run.algorithm.needs_reference:
        _load_reference(run)
    run.actor.start_optimizer(optimizer, total_updates)
    store.load(folder, run.actor.chunks, run.actor.optimizer)
    run.actor.optimizer_steps = state["optimizer_steps"]
    run.algorithm.load_state_dict(state["algorithm"])
    run.state = State(**state["progress"])
    run.report.continue_from(run.state.step)
    return True


def _choose(run: Run, resume: str) -> Path | None:
    if resume == "never":
        return None
    if resume != "auto":
        folder = Path(resume)
        problem = store.whole(folder)
        if problem:
            raise CheckpointError(f"--resume {folder}: not a whole checkpoint: {problem}")
        return folder
    for folder in store.all_checkpoints(run.run_dir / "checkpoints"):
        problem = store.whole(folder)
        if problem is None:
            return folder
        run.report.note(f"passing over {folder.name}: {problem}")
    return None


def export(run: Run) -> None:
    """`<run_dir>/export`: the final weights as a Hugging Face folder."""
    if not run.config.checkpoint.export:
        return
    run.report.phase("exporting")
    actor = run.actor
    with device.megatron():
        export_hf(run.run_dir / "export", actor.chunks, actor.family, actor.hf_config, actor.parallel, run.folder)


# The reference policy never changes, so it is written once, as the Hugging Face folder `<run_dir>/reference`.
def _save_reference(run: Run) -> None:
    folder = run.run_dir / "reference"
    if (folder / "config.json").exists():
        return
    with run.actor.as_reference(), device.megatron():
        actor = run.actor
        export_hf(folder, actor.chunks, actor.family, actor.hf_config, actor.parallel, run.folder)


def _load_reference(run: Run) -> None:
    folder = run.run_dir / "reference"
    if not (folder / "config.json").exists():
        raise CheckpointError(
            f"the recipe uses a reference policy (algorithm.kl) and {folder} is missing; it is written with the first "
            "checkpoint of a run whose recipe uses one"
        )
    run.actor.load_hf(folder)
    run.actor.keep_reference()
