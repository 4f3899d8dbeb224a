"""Checkpoints on disk: finding the one to continue from, loading it at any layout, and removing what is not needed.

A folder `step_<n>` exists only if everything in it was written (`checkpoint.saver`); its manifest says what that is.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase, ShardedObject, ShardedTensor

from megatron_rl.base.messages import errors_named
from megatron_rl.checkpoint import manifest, unpickle
from megatron_rl.checkpoint.snapshot import restore_model, sharded_model, sharded_state
from megatron_rl.runtime import device
from megatron_rl.runtime.disk import next_previous
from megatron_rl.runtime.distributed import ProcessGrid
from megatron_rl.seams import megatron_checkpoint
from megatron_rl.seams.megatron import Chunk, Optimizer, State, counts_by_parameter, keeping_adam_steps

_STEP = re.compile(r"step_(\d+)")
# What a group of parameters takes from a checkpoint. Its options are the recipe's, and each Adam has some that others lack.
_LOADED = ("params", "step")
_STATE = "state.json"
_SHOWN = 3  # damaged or unfitting tensors that a message names


class SavedState(TypedDict):
    """`state.json` of a checkpoint; older ones lack what is not required."""

    version: str
    command: str
    job: NotRequired[str | None]  # Slurm's
    run: NotRequired[str | None]  # the run's identity
    warm_up: NotRequired[bool]  # in the SFT steps before RL
    progress: dict[str, int]
    optimizer_steps: int
    algorithm: dict[str, object]
    scores: NotRequired[dict[str, float]]  # of evaluations at its step
    metrics_bytes: NotRequired[int]
    reference: dict[str, str] | None  # checksums of the reference policy's files


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which, why, and what still stands."""


def load(folder: Path, chunks: Sequence[Chunk], optimizer: Optimizer, grid: ProcessGrid) -> None:
    """Fills the model chunks and the optimizer from `folder`, whatever layout it was saved at; every rank calls it.

    The optimizer's state is the checkpoint's; its betas, epsilon and weight decay stay what they are.

    Raises:
        CheckpointError: on every rank, before anything is changed, if its tensors are not those of this model and optimizer.
    """
    with device.megatron():
        tensors = sharded_state(chunks, optimizer, loading=True)
        with errors_named(str(folder), as_error=CheckpointError):
            saved, pieces = manifest.read_tensors(folder)
        masters = _find_masters(tensors["optimizer"], _one_of(saved))
        problems = _unfitting(tensors | {"masters": masters}, saved, pieces, grid)
        if problems:
            raise CheckpointError(f"{folder} does not fit this recipe: {summarize(problems)}")
        with _named():
            state = _load_optimizer(folder, tensors, masters, chunks, counts_by_parameter(optimizer))
        own = [{key: group[key] for key in group.keys() - set(_LOADED)} for group in optimizer.param_groups]
        with keeping_adam_steps(optimizer):
            optimizer.load_state_dict(state)
    for group, kept in zip(optimizer.param_groups, own, strict=True):
        group |= kept


def load_model(folder: Path, chunks: Sequence[Chunk]) -> None:
    """Fills the model chunks alone; every rank calls it.

    Raises:
        CheckpointError: on every rank, if a file is damaged or names a class that has no place in a checkpoint.
    """
    with device.megatron(), _named():
        restore_model(chunks, unpickle.load(sharded_model(chunks), folder))


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Raises unpickling errors as CheckpointError."""
    with errors_named("", unpickle.UnpickleError, as_error=CheckpointError):
        yield


def _unfitting(
    tensors: State, saved: Mapping[str, manifest.TensorInfo], chunks: Sequence[manifest.StoredChunk], grid: ProcessGrid
) -> list[str]:
    """Tensors that the checkpoint lacks, has beyond those wanted, or has with another shape or dtype; by name and file."""
    local: dict[str, tuple[tuple[int, ...] | None, str]] = {}
    for value in megatron_checkpoint.requests(tensors):
        if isinstance(value, ShardedTensor):
            # Rows that pad the vocabulary to the layout may be more or fewer.
            shape = None if value.allow_shape_mismatch else tuple(value.global_shape)
            local[value.key] = (shape, str(value.dtype).removeprefix("torch."))
        elif isinstance(value, ShardedObject):
            local[value.unique_key] = (None, "object")
    expected: dict[str, tuple[tuple[int, ...] | None, str]] = {}
    for part in grid.all_gather(local):
        expected |= part
    files = {piece.name: piece.file for piece in reversed(chunks)}
    problems = [f"it has no tensor {name}" for name in sorted(expected.keys() - saved.keys())]
    problems += [
        f"{files.get(name, '?')} has tensor {name}, which the model has not"
        for name in sorted(saved.keys() - expected)
        if not _is_copy(name, saved)
    ]
    for name in sorted(expected.keys() & saved.keys()):
        (shape, dtype), tensor = expected[name], saved[name]
        if dtype != tensor.dtype:
            problems.append(f"tensor {name} in {files.get(name, '?')} is {tensor.dtype}, the model wants {dtype}")
        elif shape is not None and shape != tensor.shape:
            problems.append(
                f"tensor {name} in {files.get(name, '?')} has the shape {list(tensor.shape)}, the model wants {list(shape)}"
            )
    return problems


# ----------------------------------------------------------------------------------------------------------- optimizer
# The distributed and the plain optimizer name their fp32 weights differently; the plain one of an fp32 model has none
# beside the model's.
_MASTER = re.compile(r"optimizer\.state\.(?:fp32_)?param\.(.+)")


def _find_masters(state: State | list[object], stored: Callable[[str], manifest.TensorInfo | None]) -> State:
    """Renames the optimizer's fp32 weights to the names of the checkpoint.

    Those that are there as the model's own fp32 weights only are taken out of `state` and returned, as deep in it as they
    were: Megatron reads every tensor once per request.

    Args:
        state: an optimizer's sharded state, or a dictionary or list in it.
        stored: looks a weight up by name: one of its tensors in the checkpoint, or None.
    """
    elsewhere: State = {}
    for key, value in list(state.items() if isinstance(state, dict) else enumerate(state)):
        if isinstance(value, dict | list):
            inner = _find_masters(value, stored)
            if inner:
                elsewhere[key] = inner
        elif isinstance(value, ShardedBase) and (match := _MASTER.fullmatch(value.key)) and not stored(value.key):
            names = [f"optimizer.state.{kind}.{match[1]}" for kind in ("param", "fp32_param")]
            name = next((name for name in names if stored(name)), None)
            if name is not None:
                value.key = name
            elif (weight := stored(match[1])) is not None and weight.dtype == "float32":
                value.key = match[1]
                elsewhere[key] = state.pop(key)
    return elsewhere


def _one_of(saved: Mapping[str, manifest.TensorInfo]) -> Callable[[str], manifest.TensorInfo | None]:
    """Finds one of a weight's tensors: a weight of several sections is saved as `<name>.<section>` each."""
    of_section = {name.rpartition(".")[0]: info for name, info in saved.items()}
    return lambda name: saved.get(name) or of_section.get(name)


def _is_copy(name: str, saved: Mapping[str, manifest.TensorInfo]) -> bool:
    """Whether a tensor is the optimizer's copy of an fp32 weight of the model, which need not be read."""
    match = _MASTER.fullmatch(name)
    return match is not None and match[1] in saved and saved[match[1]].dtype == "float32"


def _load_optimizer(folder: Path, tensors: State, masters: State, chunks: Sequence[Chunk], by_parameter: bool) -> State:
    """Fills the model chunks; returns the optimizer's state as Megatron's optimizer wants it.

    What is no tensor (groups of parameters, number of steps) was saved in the form of the optimizers that there were then:
    plain or distributed, one for all parameters or, with expert parallelism, one for dense and one for expert parameters.
    Where there are others now, only tensors are taken, which have the same names, and the number of steps, the same for all.
    """
    optimizer_state = tensors["optimizer"]
    common = unpickle.load_common(folder)["optimizer"]
    steps = {float(step) for step in _steps(common)}
    alike = bool(steps) and _form(common) == _form(optimizer_state)
    key = "optimizer" if alike else "optimizer now"  # Megatron merges what it finds under the same key
    models = {name: value for name, value in tensors.items() if name != "optimizer"}
    loaded = unpickle.load(models | {key: optimizer_state}, folder)
    restore_model(chunks, loaded)
    state = loaded[key]
    if masters:
        megatron_checkpoint.merge_into(state, unpickle.load({"masters": masters}, folder)["masters"])
    if alike:
        return state
    [step] = steps or {0.0}  # of none Megatron's plain optimizer says nothing
    return _with_groups(state, optimizer_state, step, by_parameter)


def _form(state: State) -> tuple[int | bool, ...]:
    """The form of an optimizer's state: its numbered parts, and whether they are distributed optimizers."""
    numbers = sorted(key for key in state if isinstance(key, int))
    parts = [state[number] for number in numbers] or [state]
    return (*numbers, all("param_state_sharding_type" in part for part in parts))


def _steps(state: State | list[State]) -> Iterator[float]:
    """Every number of steps in a saved optimizer state."""
    if isinstance(state, dict):
        for key, value in state.items():
            if key in ("step", "common_step"):
                yield value
            else:
                yield from _steps(value)
    elif isinstance(state, list):
        for value in state:
            yield from _steps(value)


def _with_groups(loaded: State, requested: State, step: float, by_parameter: bool) -> State:
    """Adds to loaded tensors the groups of the optimizer that asked for them, and the number of steps where it counts them:
    with each parameter (`by_parameter`), or with each group."""
    result = dict(loaded)
    for key, value in requested.items():
        if key == "param_groups":
            groups = [
                {k: v.unwrap() if isinstance(v, LocalNonpersistentObject) else v for k, v in group.items()}
                for group in value
            ]
            result[key] = [group | ({"step": type(group["step"])(step)} if "step" in group else {}) for group in groups]
        elif key == "optimizer" or isinstance(key, int):
            result[key] = _with_groups(loaded.get(key, {}), value, step, by_parameter)
        elif key == "state":
            kept = {"common_step": torch.tensor(step)} if by_parameter else {}
            result[key] = loaded.get(key, {}) | kept  # nothing loaded where this rank's part holds no parameter
        elif key not in result and not isinstance(value, ShardedBase | dict | list):
            result[key] = value
    return result


def read_state(folder: Path) -> SavedState:
    """How far its run was. CheckpointError: it is of no run, as a conversion is."""
    where = f"{folder} is not a run's checkpoint: its {_STATE} cannot be read"
    with errors_named(where, OSError, ValueError, as_error=CheckpointError):
        return json.loads((folder / _STATE).read_text())


def choose(root: Path, grid: ProcessGrid, on_skip: Callable[[str], None], identity: str | None = None) -> Path | None:
    """The newest checkpoint that is whole to the last byte, and lies where it was written; every rank calls it and reads its
    share.

    Args:
        on_skip: called with the name and reason of each invalid one.
        identity: of the run; None: any run's.
    """
    for folder in grid.broadcast(all_checkpoints(root)):
        problems = verify(folder, grid) or misplaced(folder, identity)
        if not problems:
            return folder
        on_skip(f"skipping {folder.name}: {summarize(problems)}")
    return None


def misplaced(folder: Path, identity: str | None) -> list[str]:
    """Problems of a complete checkpoint in the wrong folder: of another step, another run or none."""
    try:
        state = read_state(folder)
    except CheckpointError as error:
        return [str(error)]
    progress = state["progress"]
    step = progress["warm_up"] if state.get("warm_up") else progress["step"]
    problems = [] if step == step_of(folder) else [f"it is the checkpoint of step {step}"]
    run = state.get("run")  # older ones do not say whose they are
    if None not in (run, identity) and run != identity:
        problems.append(f"it is of another run ({run}; this one is {identity})")
    return problems


def verify(folder: Path, grid: ProcessGrid, skip_prefix: str | None = None) -> list[str]:
    """`manifest.verify`, all ranks together: what is wrong with a checkpoint, by file and tensor."""
    found = grid.all_gather(manifest.verify(folder, grid.rank, grid.world, skip_prefix))
    return list(dict.fromkeys(problem for part in found for problem in part))


def summarize(problems: list[str]) -> str:
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return "; ".join(problems[:_SHOWN]) + more


def all_checkpoints(root: Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    found = [path for path in root.glob("step_*") if _STEP.fullmatch(path.name)] if root.is_dir() else []
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    match = _STEP.fullmatch(folder.name)
    assert match is not None
    return int(match[1])


def newest(root: Path) -> Path | None:
    """The newest checkpoint of a run with all its files in full length."""
    own = (folder for folder in all_checkpoints(root) if (folder / _STATE).is_file())
    return next((folder for folder in own if manifest.missing(folder) is None), None)


def folder_of(run_dir: Path, warm_up: bool) -> Path:
    """The folder of a run's checkpoints; those of the warm-up before RL have their own."""
    return run_dir / "sft" / "checkpoints" if warm_up else run_dir / "checkpoints"


def newest_of_run(run_dir: Path) -> Path | None:
    """The newest checkpoint of a run folder with all its files in full length: of the warm-up only where RL has none."""
    return newest(folder_of(run_dir, warm_up=False)) or newest(folder_of(run_dir, warm_up=True))


def name_of(folder: Path) -> str:
    """`step_<n>`, with the stage where it is the warm-up's."""
    return f"{folder.name} of the warm-up" if folder.parent.parent.name == "sft" else folder.name


def archive(root: Path, step: int) -> list[Path]:
    """Moves checkpoints of later steps than `step` to `previous_<k>` in `root`; where they are then.

    A run that continues from `step` comes to these steps again. Otherwise they would still count as newest: `keep` would
    retain them and the next start would resume from them.
    """
    later = [folder for folder in all_checkpoints(root) if step_of(folder) > step]
    if not later:
        return []
    aside = next_previous(root)
    aside.mkdir()
    return [folder.rename(aside / folder.name) for folder in later]


def keep(root: Path, newest: int, best: int = 0, score: str | None = None) -> None:
    """Removes all but the `newest` newest checkpoints and the `best` with the highest `score` (of equal ones the newer), and
    what an interrupted save left behind."""
    folders = all_checkpoints(root)
    retained = set(folders[:newest])
    if best and score is not None:
        scored = [
            (value, step_of(folder), folder) for folder in folders if (value := score_of(folder, score)) is not None
        ]
        retained |= {folder for _, _, folder in sorted(scored, reverse=True)[:best]}
    unwanted = [folder for folder in folders if folder not in retained]
    for folder in [*unwanted, *root.glob(".step_*.writing"), *root.glob(".step_*.old")]:
        shutil.rmtree(folder, ignore_errors=True)


def score_of(folder: Path, score: str) -> float | None:
    """An evaluation's number recorded with the checkpoint; None where there was none at its step, or it is no number."""
    try:
        value = read_state(folder).get("scores", {}).get(score)
    except CheckpointError:
        return None
    return None if value is None or math.isnan(value) else value
