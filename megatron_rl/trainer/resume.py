"""Resuming: finding the checkpoint, checking that it fits the run, and loading it."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.base.plugins import read_yaml
from megatron_rl.checkpoint import manifest, store
from megatron_rl.checkpoint.store import CheckpointError, SavedState
from megatron_rl.config import as_tree, changes
from megatron_rl.config.actor import OptimizerConfig
from megatron_rl.models import HFConfig
from megatron_rl.runtime import disk
from megatron_rl.trainer import adapters
from megatron_rl.trainer.checkpoints import State, model_facts
from megatron_rl.trainer.run import Run
from megatron_rl.weights.files import companions

IDENTITY = "run_id"  # in the run folder: what tells this run's checkpoints from those of another one
# Files of a model folder that give token numbers their meaning; others, like chat templates, shape prompts only.
_VOCABULARY = re.compile(
    r"tokenizer\.(json|model)|vocab\.\w+|merges\.txt|added_tokens\.json|.*\.(tiktoken|spm|bpe)|spiece\.model"
)


def load_checkpoint(run: Run, resume: str, optimizer: OptimizerConfig, total_updates: int) -> bool:
    """Continues from a checkpoint: `auto` the newest whole one of this run, a path that one, `never` none.

    Everything in it is read and compared with its checksums first. Returns whether there was one. Checkpoints that are not
    whole, or not this run's, are named and skipped; this run's later than the one it continues from are moved to
    `previous_<k>` beside them. One of the warm-up before RL leaves the run with `state.warming_up`.

    Args:
        optimizer, total_updates: of the run's own steps; a warm-up has those of the section `sft`.

    Raises:
        CheckpointError: a given path that is no whole checkpoint; one of another command, model, tokenizer or estimator; none
            of this run's checkpoints can be continued.
    """
    checkpoints, learner = run.checkpoints, run.learner
    with run.timer.untimed("load", "checking the checkpoint"):
        identity = _identity(run)
        folder = _choose(run, _mode(run, resume), identity)
    if folder is None:
        run.report.start_over()
        _identify(run, secrets.token_hex(8))
        return False
    saved = store.read_state(folder)
    state = State(**saved["progress"], warming_up=saved.get("warm_up", False))
    _check(run, folder, saved, state)
    _note_changes(run, folder)
    if learner.algorithm.needs_reference and not state.warming_up and learner.actor.adapters is None:
        _load_reference(run, folder, saved["reference"])
    if state.warming_up:
        optimizer, total_updates = run.config.sft.optimizer, run.config.sft.steps
    learner.actor.start_optimizer(optimizer, total_updates)
    with run.timer.untimed("load", f"loading {folder.name}"):
        store.load(folder, learner.actor.chunks, learner.actor.optimizer, run.grid)
    learner.actor.optimizer_steps = saved["optimizer_steps"]
    learner.algorithm.load_state_dict(saved["algorithm"])
    run.state = state
    own = folder.resolve().parent == checkpoints.root(state.warming_up).resolve()
    if run.grid.is_main:
        _archive_later(run)
    _identify(run, identity or (saved.get("run") if own else None) or secrets.token_hex(8))
    run.report.continue_from(state.stage_step, saved.get("metrics_bytes") if own else None, state.warming_up)
    checkpoints.is_at(state, own)
    return True


def _identify(run: Run, identity: str) -> None:
    """Gives the run its identity, rank 0's, and notes it in the run folder."""
    run.checkpoints.identity = run.grid.broadcast(identity)
    if run.grid.is_main:
        disk.replace(run.run_dir / IDENTITY, run.checkpoints.identity)


def _identity(run: Run) -> str | None:
    """This run folder's, if a run has begun there."""
    path = run.run_dir / IDENTITY
    return run.grid.broadcast(path.read_text() if run.grid.is_main and path.is_file() else None)


def _archive_later(run: Run) -> None:
    state = run.state
    places = [(run.checkpoints.root(state.warming_up), state.stage_step)]
    if state.warming_up:  # any RL checkpoint is later
        places.append((run.checkpoints.root(False), -1))
    for root, step in places:
        if later := store.archive(root, step):
            run.report.note(f"moved {', '.join(path.name for path in later)} to {later[0].parent}")


# --------------------------------------------------------------------------------------------------------------- which
def _mode(run: Run, resume: str) -> str:
    """`resume`; but `auto` where a batch job was requeued and has saved before: the command line was for its first start."""
    mode = resume
    if run.grid.is_main and int(os.environ.get("SLURM_RESTART_COUNT") or 0):
        newest = store.newest_of_run(run.run_dir)
        if newest is not None and store.read_state(newest).get("job") == os.environ.get("SLURM_JOB_ID"):
            mode = "auto"
    mode = run.grid.broadcast(mode)
    if mode != resume:
        run.report.note(f"requeued job: resuming its own latest checkpoint; --resume {resume} is ignored")
    return mode


def _choose(run: Run, resume: str, identity: str | None) -> Path | None:
    if resume == "never":
        return None
    if resume != "auto":
        folder = Path(resume)
        problems = store.verify(folder, run.grid)
        if problems:
            raise CheckpointError(f"--resume {folder}: not a whole checkpoint: {store.summarize(problems)}")
        return folder
    for warm_up in (False, True):  # a warm-up's last until RL has one
        root = store.folder_of(run.run_dir, warm_up)
        whole = store.choose(root, run.grid, run.report.note, identity)
        if whole is not None:
            return whole
        if run.grid.broadcast(bool(store.all_checkpoints(root))):
            raise CheckpointError(
                f"none of the checkpoints in {root} can be continued (for the reasons above), and nothing was changed. Put "
                "a whole one there, or try again where the file system may have failed for a while; to start over from the "
                "first step, run the same command with --resume never, which moves them to previous_<k>"
            )
    return None


# -------------------------------------------------------------------------------------------------------- does it fit?
def _check(run: Run, folder: Path, saved: SavedState, state: State) -> None:
    if saved["command"] != run.report.command:
        raise CheckpointError(
            f"{folder} was written by `megatron-rl {saved['command']}`; give this run another run_dir, or --resume never"
        )
    check_model(run.learner.actor.hf_config, folder)
    adapters.check(folder, run.checkpoints.adapters)
    check_frozen(run.config.actor.freeze_vision_tower, folder)
    _check_tokenizer(run, folder)
    estimator, own = saved["algorithm"]["estimator"], run.learner.algorithm.estimator.name
    if estimator != own:
        raise CheckpointError(
            f"{folder} is of a run with the estimator {estimator!r}, the recipe's is {own!r}; to "
            f"start a new run from its weights, give it another run_dir and model.path={folder}"
        )
    done, wanted = state.warm_up, run.config.sft.steps
    if state.warming_up and (done > wanted or wanted == 0):
        raise CheckpointError(
            f"{folder} is of step {done} of the warm-up, and the recipe's has sft.steps = {wanted}; set it back, or start "
            "over with --resume never"
        )


def check_model(hf_config: HFConfig, folder: Path) -> None:
    saved, own = manifest.read(folder)["model"], model_facts(hf_config)
    # Older checkpoints have no objects and lists in it.
    names = saved.keys() | {name for name, value in own.items() if not isinstance(value, dict | list)}
    changed = [
        f"{name} is {saved.get(name)!r} there and {own.get(name)!r} here"
        for name in sorted(names)
        if saved.get(name) != own.get(name)
    ]
    if changed:
        raise CheckpointError(
            f"{folder} is of another model: {store.summarize(changed)}; give this run another run_dir, or --resume never"
        )


def check_frozen(frozen: bool, folder: Path) -> None:
    saved = (_saved_recipe(folder).get("actor") or {}).get("freeze_vision_tower", False)
    if saved != frozen:
        raise CheckpointError(
            f"{folder} is of a run with actor.freeze_vision_tower = {saved}, whose optimizer has other state; set it back, "
            f"or to start a new run from its weights, give it another run_dir and model.path={folder}"
        )


def _check_tokenizer(run: Run, folder: Path) -> None:
    """Token numbers must mean what they meant: the model folder's vocabulary is the one that is kept in the checkpoint."""
    model = run.checkpoints.folder
    here, there = companions(model), companions(folder)
    changed = sorted(
        name
        for name in here.keys() & there.keys()
        if _VOCABULARY.fullmatch(name) and here[name].read_bytes() != there[name].read_bytes()
    )
    if changed:
        raise CheckpointError(
            f"{folder} was trained with another tokenizer: {', '.join(changed)} in {model} is not what it was; restore "
            "it (or model.create.characters and .words), or give this run another run_dir, or --resume never"
        )


def _saved_recipe(folder: Path) -> dict[str, Any]:
    """CheckpointError where it cannot be read."""
    try:
        recipe = read_yaml(folder / "recipe.yaml")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: its recipe cannot be read: {error}") from None
    if not isinstance(recipe, dict):
        raise CheckpointError(f"{folder}: its recipe.yaml holds no recipe")
    return recipe


def _note_changes(run: Run, folder: Path) -> None:
    saved = _saved_recipe(folder)
    changed = [
        f"{key} {before!r} -> {after!r}"
        for key, before, after in changes(saved, as_tree(run.config))
        if key != "run_dir"
    ]
    if changed:
        run.report.note(f"the recipe is not that of {folder.name}: {', '.join(changed)}")


# ------------------------------------------------------------------------------------------------- the reference policy
def _load_reference(run: Run, checkpoint: Path, digests: Mapping[str, str] | None) -> None:
    """Loads the one that belongs to the checkpoint, from this run's folder or from where the checkpoint lies."""
    own, problems, written = run.run_dir / "reference", list[str](), dict(digests or {})
    for folder in dict.fromkeys((own, checkpoint.absolute().parents[1] / "reference")) if written else ():
        found = run.grid.broadcast(manifest.digests(folder) if run.grid.is_main else {})
        wrong = sorted(name for name, digest in written.items() if found.get(name) != digest)
        if not wrong:
            run.learner.actor.load_hf(folder)
            run.learner.actor.keep_reference()
            if folder == own:  # otherwise the next save writes it here
                run.checkpoints.reference_digests = written
            return
        problems.append(f"{folder / wrong[0]} is not what was written" if found else f"{folder} is missing")
    raise CheckpointError(
        f"the recipe uses a reference policy (algorithm.kl), but {' and '.join(problems) or f'{checkpoint} has none'}; it is "
        "written with the first checkpoint of a run whose recipe uses one"
    )
