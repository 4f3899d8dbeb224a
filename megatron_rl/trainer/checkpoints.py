"""When a run saves, what a checkpoint holds, and the final export."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import megatron_rl
from megatron_rl.checkpoint import manifest, store
from megatron_rl.checkpoint.saver import SaveOutcome, Saver
from megatron_rl.checkpoint.snapshot import Snapshot
from megatron_rl.checkpoint.store import CheckpointError, SavedState
from megatron_rl.config import to_yaml
from megatron_rl.config.schema import Config
from megatron_rl.models.hf_config import JSON, HFConfig, with_dtype
from megatron_rl.runtime import device, provenance
from megatron_rl.runtime.distributed import ProcessGrid
from megatron_rl.runtime.owner import Ownership
from megatron_rl.runtime.step_timer import StepTimer
from megatron_rl.trainer import adapters
from megatron_rl.trainer.adapters import AdapterFacts
from megatron_rl.trainer.learner import Learner
from megatron_rl.trainer.report import Reporter
from megatron_rl.weights.export import export_hf, export_peft
from megatron_rl.weights.files import companions


@dataclass(frozen=True)
class State:
    """Progress of a run: all that a checkpoint holds besides weights, optimizer and estimator.

    Randomness needs no state: every seed is a function of the recipe's seed and the step.
    """

    step: int = 0  # RL steps done (or SFT steps, under `megatron-rl sft`)
    warm_up: int = 0  # SFT steps of the warm-up before RL done
    position: int = 0  # training prompts taken
    warming_up: bool = False  # in the SFT steps before RL

    @property
    def stage_step(self) -> int:
        """Steps done of the stage that the run is in."""
        return self.warm_up if self.warming_up else self.step

    def progress(self) -> dict[str, int]:
        return {"step": self.step, "warm_up": self.warm_up, "position": self.position}


class Checkpoints:
    """The checkpoints of one run, the reference policy beside them, and the export.

    Args:
        folder: Hugging Face folder that the model started from.
        ownership: rank 0's, of the run folder.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        grid: ProcessGrid,
        folder: Path,
        learner: Learner,
        report: Reporter,
        timer: StepTimer,
        ownership: Ownership | None = None,
    ) -> None:
        self.config, self.run_dir, self.folder = config, run_dir, folder
        self.identity = ""  # tells this run's checkpoints from another's
        self.reference_digests: dict[str, str] | None = None  # checksums of `<run_dir>/reference`, once it is there
        self._grid, self._learner, self._report, self.timer = grid, learner, report, timer
        self._ownership = ownership
        self._saver: Saver | None = None  # from the first save on
        self._due = False  # a save was put off, or is to be done after this step
        self._refused = 0  # saves that were not begun, since the last `metrics`

    def root(self, warm_up: bool) -> Path:
        """The folder of the checkpoints of RL, or of the warm-up before it."""
        return store.folder_of(self.run_dir, warm_up)

    # ------------------------------------------------------------------------------------------------------------- save
    def capture(self, step: int, last_step: int, warm_up: bool = False) -> Snapshot | None:
        """A copy of weights and optimizer in host memory if the recipe wants this step saved; the device must be the
        actor's.

        While the disk is still busy with the previous save, this one is put off to the next step: a slow disk does not hold
        up training. The last step's waits.
        """
        config = self.config.checkpoint
        if not config.every:
            return None
        every = config.sft_every if warm_up else config.every
        self._due = self._due or bool(every and step % every == 0) or step == last_step
        if not self._due:
            return None
        if step != last_step and self._saver_of(warm_up).busy():
            self._report.note(
                f"the previous save is still being written; step {step + 1} will be saved instead of {step}"
            )
            return None
        return self._take(warm_up)

    def save(self, state: State, scores: Mapping[str, float] | None = None) -> None:
        """Saves between two steps; the device must be the actor's."""
        snapshot = self._take(state.warming_up)
        if snapshot is not None:
            self.submit(state, snapshot, scores or {})

    def save_before_end(self, state: State) -> None:
        """At a stop: a checkpoint of the last complete step, unless it exists or the recipe has no checkpoints."""
        if not self.config.checkpoint.every:
            return
        if self._saver is not None:
            self._saver.drain()  # before then, ranks may differ in whether it failed
        if self._saver is None or self._saver.last_step != state.stage_step:
            self.save(state)
        self.finish()

    def submit(self, state: State, snapshot: Snapshot, scores: Mapping[str, float]) -> None:
        """Starts writing `step_<n>`: the captured tensors, the resolved recipe, progress and estimator state.
        `scores`: the step's metrics, of which evaluations are kept to choose the best checkpoints by.
        """
        evaluations = {name: value for name, value in scores.items() if name.startswith("eval/")}
        best = self.config.checkpoint.best
        if best is not None and evaluations and best not in evaluations:
            raise ValueError(
                f"checkpoint.best {best!r} is no metric of the evaluations; they have {', '.join(evaluations)}"
            )
        actor = self._learner.actor
        progress: SavedState = {
            "version": megatron_rl.__version__,
            "command": self._report.command,
            "job": os.environ.get("SLURM_JOB_ID"),
            "run": self.identity or None,
            "warm_up": state.warming_up,
            "progress": state.progress(),
            "optimizer_steps": actor.optimizer_steps,
            "algorithm": self._learner.algorithm.state_dict(),
            "scores": evaluations,
            "metrics_bytes": self._report.flush_metrics(state.warming_up),
            "reference": self.reference_digests,
        }
        about = {
            "step": state.stage_step,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": provenance.versions(),
            "layout": {**asdict(self.config.actor.parallel), "data": self._grid.dp, "world": self._grid.world},
            "optimizer": "distributed" if actor.optimizer_config.distributed else "plain",
            "model": model_facts(actor.hf_config),
            "adapters": self.adapters,
        }
        files = {
            "state.json": (json.dumps(progress, indent=1, sort_keys=True) + "\n").encode(),
            "recipe.yaml": to_yaml(self.config).encode(),
        }
        # A checkpoint is a model folder: another run's `model.path`, or the source of a conversion, wherever it lies.
        if self._grid.is_main:
            files |= _companions(self.folder)
        if self._grid.is_main and actor.adapters is None:  # which are no model by themselves
            config = with_dtype(actor.hf_config, self.config.model.dtype)
            files["config.json"] = (json.dumps(config, indent=2) + "\n").encode()
        self._saver_of(state.warming_up).submit(state.stage_step, snapshot, about, files)

    def metrics(self) -> dict[str, float]:
        """Metrics of the saves that have ended since the last call; reports those that failed. Every rank calls it.

        Raises:
            CheckpointError: on every rank, where a save failed and `checkpoint.on_failure` is `stop`.
            OwnedError: on rank 0, where another run has taken the run folder.
        """
        if self._ownership is not None:
            self._ownership.check()
        outcomes = self._saver.outcomes() if self._saver is not None else []
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        if self._saver is not None and self.config.checkpoint.on_failure == "stop":
            # The writers of all ranks end alike, but not at the same moment.
            first = next((own for own in self._grid.all_gather(failed) if own), None)
            if first:
                raise CheckpointError(
                    f"{self._failure(first[-1])}; make room or change checkpoint.every, then run the same command to continue"
                )
        for outcome in failed:
            self._report.warn(f"{self._failure(outcome)}; training goes on")
        refused, self._refused = self._refused, 0
        if not outcomes:
            return {"checkpoint/failed": float(refused)} if refused else {}
        return {
            "checkpoint/blocked_s": sum(outcome.blocked for outcome in outcomes),
            "checkpoint/write_s": sum(outcome.seconds for outcome in outcomes),
            "checkpoint/bytes": float(sum(outcome.num_bytes for outcome in outcomes)),
            "checkpoint/failed": float(len(failed) + refused),
        }

    def finish(self) -> None:
        """Waits for what is still being written. Raises CheckpointError: the last of this run's saves failed."""
        if self._saver is None:
            return
        with self.timer.untimed("checkpoint", "finishing the checkpoint"):
            self._saver.drain()
        outcomes = self._saver.outcomes()
        for outcome in outcomes:
            if outcome.error is None:
                self._report.note(f"saved step_{outcome.step}: {_seconds(outcome)}")
        if outcomes and outcomes[-1].error is not None:
            raise CheckpointError(f"{self._failure(outcomes[-1])}; make room, then run the same command to continue")

    def end_warm_up(self) -> None:
        """Every rank calls it after the warm-up's last step: pending saves are finished, and RL's saves come next.

        Raises:
            CheckpointError: as `metrics`.
        """
        if self._saver is not None:
            with self.timer.untimed("checkpoint", "finishing the checkpoint"):
                self._saver.drain()
            self.metrics()
            self._saver.close()
        self._saver, self._due = None, False

    def close(self) -> None:
        if self._saver is not None:
            self._saver.drain()

    def is_at(self, state: State, saved: bool) -> None:
        """The run continues at `state`. `saved`: one of its own checkpoints is exactly there."""
        self._saver_of(state.warming_up).last_step = state.stage_step if saved else None

    def _take(self, warm_up: bool) -> Snapshot | None:
        self._due = False
        if self._learner.actor.reference is not None and self.reference_digests is None:
            error = self._save_reference()
            if error is not None:
                if self.config.checkpoint.on_failure == "stop":
                    raise CheckpointError(error)
                self._report.warn(
                    f"{error}; without it no checkpoint can be continued, so none is written; training goes on"
                )
                self._refused += 1
                return None
        with self.timer.untimed("checkpoint", "saving a checkpoint"):
            return self._saver_of(warm_up).take(self._learner.actor.chunks, self._learner.actor.optimizer)

    def _saver_of(self, warm_up: bool) -> Saver:
        if self._saver is None:
            after, asynchronous = self._after_save(warm_up), self.config.checkpoint.asynchronous
            self._saver = Saver(self.run_dir, self.root(warm_up), self._grid, asynchronous, after)
        return self._saver

    def _after_save(self, warm_up: bool) -> Callable[[], None]:
        """The clean-up by rank 0's writer once another checkpoint is complete."""
        config, root, warm_ups = self.config.checkpoint, self.root(warm_up), self.root(True)

        def remove() -> None:
            store.keep(root, config.keep, 0 if warm_up else config.keep_best, config.best)
            if not warm_up:  # RL has a checkpoint of its own
                shutil.rmtree(warm_ups, ignore_errors=True)

        return remove

    def _failure(self, outcome: SaveOutcome) -> str:
        assert self._saver is not None  # the outcome is its
        newest = store.newest_of_run(self.run_dir)
        left = f"The last whole checkpoint is {store.name_of(newest)}" if newest else "There is no earlier checkpoint"
        return f"could not save {self._saver.root / f'step_{outcome.step}'}: {outcome.error}. {left}"

    @functools.cached_property
    def adapters(self) -> AdapterFacts | None:
        """This run's; every rank asks for them."""
        return adapters.facts(self._learner.actor, self.folder)

    # ----------------------------------------------------------------------------------------------------------- export
    def export(self) -> None:
        """`<run_dir>/export`: the final weights as a Hugging Face folder; adapters merged, and beside it by themselves, in
        `<run_dir>/adapter`, as PEFT's.

        Raises:
            CheckpointError: it could not be written.
        """
        if not self.config.checkpoint.export:
            return
        with self.timer.untimed("export", "exporting"):
            error = self._export(self.run_dir / "export") or self._export(self.run_dir / "adapter", adapters=True)
        if error is not None:
            raise CheckpointError(f"{error}. Make room, then run the same command: it writes the export again")

    def _export(self, folder: Path, adapters: bool = False) -> str | None:
        """The error, the same on every rank; None on success. `adapters`: these alone, where there are any."""
        actor, lora = self._learner.actor, self.config.actor.lora
        try:
            with device.megatron():
                if not adapters:
                    export_hf(folder, actor.chunks, actor.family, actor.hf_config, actor.parallel, self.folder)
                elif actor.adapters is not None:
                    export_peft(
                        folder, actor.chunks, actor.adapters, lora, actor.hf_config, actor.parallel, self.folder
                    )
        except RuntimeError as failure:  # raised on every rank
            return str(failure)
        return None

    def _save_reference(self) -> str | None:
        """Writes the reference policy, which never changes, as the Hugging Face folder `<run_dir>/reference`, and notes its
        checksums. Returns what went wrong, the same on every rank."""
        folder = self.run_dir / "reference"
        with self._learner.actor.as_reference():
            error = self._export(folder)
        if error is None:
            own = manifest.digests(folder) if self._grid.is_main else None
            self.reference_digests = self._grid.broadcast(own)
        return error


def _seconds(outcome: SaveOutcome) -> str:
    size = outcome.num_bytes / 2**20
    return f"{size:,.1f} MiB, training waited {outcome.blocked:.2f} s, written in {outcome.seconds:.2f} s"


@functools.lru_cache(maxsize=1)
def _companions(folder: Path) -> dict[str, bytes]:
    """Tokenizer, generation config and chat templates: name -> content."""
    return {name: path.read_bytes() for name, path in companions(folder).items()}


def model_facts(hf_config: HFConfig) -> dict[str, JSON]:
    """The Hugging Face configuration without what is not the model."""
    return {name: value for name, value in sorted(hf_config.items()) if name not in _NOT_THE_MODEL}


# Fields that transformers and conversions add to the architecture's.
_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
