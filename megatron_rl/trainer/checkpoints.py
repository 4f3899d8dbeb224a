"""When a run saves, what a checkpoint holds, and the final export."""

from __future__ import annotations

import functools
import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import megatron_rl
from megatron_rl.agents import journal
from megatron_rl.checkpoint import store
from megatron_rl.checkpoint.saver import SaveOutcome, Saver
from megatron_rl.checkpoint.snapshot import Snapshot
from megatron_rl.checkpoint.store import CheckpointError, SavedState
from megatron_rl.config import to_yaml
from megatron_rl.config.actor import OptimizerConfig
from megatron_rl.config.schema import Config
from megatron_rl.models.hf_config import with_dtype
from megatron_rl.runtime import disk, provenance
from megatron_rl.runtime.distributed import ProcessGrid
from megatron_rl.runtime.owner import Ownership
from megatron_rl.runtime.step_timer import StepTimer
from megatron_rl.trainer import adapter_facts as adapters
from megatron_rl.trainer import compatibility
from megatron_rl.trainer.adapter_facts import AdapterFacts
from megatron_rl.trainer.exports import ReferenceFolder, export
from megatron_rl.trainer.learner import Learner
from megatron_rl.trainer.report import Reporter
from megatron_rl.trainer.state import State
from megatron_rl.weights.files import companions

IDENTITY = "run_id"  # in the run folder: what tells this run's checkpoints from those of another one


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
        self.continued: Path | None = None  # the checkpoint that the run goes on from
        self.identity = ""  # tells this run's checkpoints from another's
        self._reference = ReferenceFolder(run_dir, learner.actor, folder)
        self._grid, self._learner, self._report, self.timer = grid, learner, report, timer
        self._ownership = ownership
        self._saver: Saver | None = None  # from the first save on
        self._due = False  # a save was put off, or is to be done after this step
        self._refused = 0  # saves that were not begun, since the last `metrics`
        self._refusal: str | None = None  # why the last one was not

    def root(self, warm_up: bool) -> Path:
        """The folder of the checkpoints of RL, or of the warm-up before it."""
        return store.folder_of(self.run_dir, warm_up)

    # ----------------------------------------------------------------------------------------------------------- resume
    def resume(
        self, resume: str, optimizer: OptimizerConfig, total_updates: int, complete: Callable[[State, Path], State]
    ) -> State | None:
        """Continues from a checkpoint: `auto` the newest whole one of this run, a path that one, `never` none.

        All of it is compared with its checksums first. Returns its progress (a warm-up's is `warming_up`), None without one.
        Others that are not whole, or not this run's, are named and skipped; later ones of it move to `previous_<k>`.

        Args:
            optimizer, total_updates: of the run's own steps; a warm-up has those of the section `sft`.
            complete: adds to a state what its checkpoint has of rollouts, or of prompts, that wait.

        Raises:
            CheckpointError: a given path that is none, or not this run's kind; none of the run's can be continued.
        """
        with self.timer.untimed("load", "checking the checkpoint"):
            path = self.run_dir / IDENTITY
            identity = self._grid.broadcast(path.read_text() if self._grid.is_main and path.is_file() else None)
            folder = self._choose(self._mode(resume), identity)
        if folder is None:
            self._report.start_over()
            self._identify(secrets.token_hex(8))
            return None
        saved, learner = store.read_state(folder), self._learner
        state = State.of(saved)
        self._check(folder, saved, state)
        state, self.continued = complete(state, folder), folder  # may refuse; nothing of the run folder is changed yet
        if changed := compatibility.changed_keys(self.config, folder):
            self._report.note(f"the recipe is not that of {folder.name}: {', '.join(changed)}")
        if learner.algorithm.needs_reference and not state.warming_up and learner.actor.adapters is None:
            self._reference.load(folder, saved["reference"])
        if state.warming_up:
            optimizer, total_updates = self.config.sft.optimizer, self.config.sft.steps
        with self.timer.untimed("load", f"loading {folder.name}"):
            learner.resume(folder, saved, optimizer, total_updates)
        is_own = folder.resolve().parent == self.root(state.warming_up).resolve()
        if self._grid.is_main:
            self._set_later_aside(state)
            journal.drop(self.run_dir, state.step)
        self._identify(identity or (saved.get("run") if is_own else None) or secrets.token_hex(8))
        self._report.continue_from(state.stage_step, saved.get("metrics_bytes") if is_own else None, state.warming_up)
        self._saver_of(state.warming_up).last_step = state.stage_step if is_own else None
        return state

    def _identify(self, identity: str) -> None:
        """Gives the run its identity, rank 0's, and notes it in the run folder."""
        self.identity = self._grid.broadcast(identity)
        if self._grid.is_main:
            disk.replace(self.run_dir / IDENTITY, self.identity)

    def _mode(self, resume: str) -> str:
        """`resume`; but `auto` where a batch job was requeued and has saved before: the command line was for its first
        start."""
        mode = resume
        if self._grid.is_main and int(os.environ.get("SLURM_RESTART_COUNT") or 0):
            newest = store.newest_of_run(self.run_dir)
            if newest is not None and store.read_state(newest).get("job") == os.environ.get("SLURM_JOB_ID"):
                mode = "auto"
        mode = self._grid.broadcast(mode)
        if mode != resume:
            self._report.note(f"requeued job: resuming its own latest checkpoint; --resume {resume} is ignored")
        return mode

    def _choose(self, resume: str, identity: str | None) -> Path | None:
        if resume == "never":
            return None
        if resume != "auto":
            folder = Path(resume)
            problems = store.verify(folder, self._grid)
            if problems:
                raise CheckpointError(f"--resume {folder}: not a whole checkpoint: {store.summarize(problems)}")
            return folder
        for warm_up in (False, True):  # a warm-up's last until RL has one
            root = self.root(warm_up)
            whole = store.choose(root, self._grid, self._report.note, identity)
            if whole is not None:
                return whole
            if self._grid.broadcast(bool(store.all_checkpoints(root))):
                raise CheckpointError(
                    f"none of the checkpoints in {root} can be continued (for the reasons above), and nothing was changed. "
                    "Put a whole one there, or try again where the file system may have failed for a while; to start over "
                    "from the first step, run the same command with --resume never, which moves them to previous_<k>"
                )
        return None

    def _check(self, folder: Path, saved: SavedState, state: State) -> None:
        """CheckpointError where the run may not continue from it."""
        config, learner = self.config, self._learner
        compatibility.check_command(saved, self._report.command, folder)
        compatibility.check_model(learner.actor.hf_config, folder)
        adapters.check(folder, self.adapters)
        compatibility.check_frozen(config.actor.freeze_vision_tower, folder)
        compatibility.check_tokenizer(self.folder, folder)
        compatibility.check_estimator(saved, learner.algorithm.estimator.name, folder)
        compatibility.check_stage(state, config.sft.steps, folder)
        compatibility.check_drawn(config, folder)
        compatibility.check_waiting(config, state, folder)

    def _set_later_aside(self, state: State) -> None:
        roots = [(self.root(state.warming_up), state.stage_step)]
        if state.warming_up:  # any RL checkpoint is later
            roots.append((self.root(False), -1))
        for root, step in roots:
            if later := store.archive(root, step):
                self._report.note(f"moved {', '.join(path.name for path in later)} to {later[0].parent}")

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
        """Saves at a stop a checkpoint of the last complete step, unless it exists or the recipe has no checkpoints."""
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
            "reference": self._reference.digests,
        }
        about = {
            "step": state.stage_step,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": provenance.versions(),
            "layout": {**asdict(self.config.actor.parallel), "data": self._grid.dp, "world": self._grid.world},
            "optimizer": "distributed" if actor.optimizer_config.distributed else "plain",
            "model": compatibility.model_facts(actor.hf_config),
            "adapters": self.adapters,
        }
        files = {
            **state.files(self._grid),
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
        if self._refusal is not None:
            raise CheckpointError(
                f"{self._refusal}; so no checkpoint was written; make room, then run the same command"
            )
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

    def _take(self, warm_up: bool) -> Snapshot | None:
        self._due = False
        self._refusal = self._reference.save() if self._reference.is_due else None
        if self._refusal is not None:
            if self.config.checkpoint.on_failure == "stop":
                raise CheckpointError(self._refusal)
            self._report.warn(
                f"{self._refusal}; without it no checkpoint can be continued, so none is written; training goes on"
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
            if not warm_up and (newest := store.newest(root)) is not None:
                journal.drop(self.run_dir, int(newest.name.removeprefix("step_")))
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
            actor = self._learner.actor
            error = export(self.run_dir / "export", actor, self.folder)
            error = error or export(self.run_dir / "adapter", actor, self.folder, adapters=True)
        if error is not None:
            raise CheckpointError(f"{error}. Make room, then run the same command: it writes the export again")


def _seconds(outcome: SaveOutcome) -> str:
    size = outcome.num_bytes / 2**20
    return f"{size:,.1f} MiB, training waited {outcome.blocked:.2f} s, written in {outcome.seconds:.2f} s"


@functools.lru_cache(maxsize=1)
def _companions(folder: Path) -> dict[str, bytes]:
    """Tokenizer, generation config and chat templates: name -> content."""
    return {name: path.read_bytes() for name, path in companions(folder).items()}
