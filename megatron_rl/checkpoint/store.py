"""Checkpoints on disk: finding the one to continue from, loading it at any layout, and removing what is not needed.

A folder `step_<n>` exists only if everything in it was written (`checkpoint.saver`); its manifest says what that is.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_rl.checkpoint import manifest
from megatron_rl.checkpoint.snapshot import sharded_model, sharded_state
from megatron_rl.runtime import device
from megatron_rl.runtime.distributed import Grid

_STEP = re.compile(r"step_(\d+)")
_HYPERPARAMETERS = ("betas", "eps", "weight_decay")  # of a group of parameters; the learning rate is set at every step
_SHOWN = 3  # damaged or unfitting tensors that a message names


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which, why, and what still stands."""


def load(folder: Path, chunks: list[Any], optimizer: Any, grid: Grid) -> None:
    """Fills the model chunks and the optimizer from `folder`, whatever layout it was saved at; every rank calls it.

    The optimizer's state is the checkpoint's; its betas, epsilon and weight decay stay what they are.

    Raises:
        CheckpointError: on every rank, before anything is changed, if its tensors are not those of this model and optimizer.
    """
    from megatron.core import dist_checkpointing

    with device.megatron():
        tensors = sharded_state(chunks, optimizer, loading=True)
        problems = _unfitting(folder, tensors, grid)
        if problems:
            raise CheckpointError(f"{folder} does not fit this recipe: {shown(problems)}")
        loaded = dist_checkpointing.load(tensors, str(folder))
        for i, chunk in enumerate(chunks):
            chunk.load_state_dict(loaded[f"model{i}"], strict=True)
        own = [{key: group[key] for key in _HYPERPARAMETERS} for group in optimizer.param_groups]
        common = dist_checkpointing.load_common_state_dict(str(folder))["optimizer"]
        with _keeping_adam_steps():
            optimizer.load_state_dict(_regrouped(loaded["optimizer"], tensors["optimizer"], common))
    _separate_adam_steps(optimizer)
    for group, kept in zip(optimizer.param_groups, own, strict=True):
        group |= kept


def load_model(folder: Path, chunks: list[Any]) -> None:
    """Fills the model chunks alone; every rank calls it."""
    from megatron.core import dist_checkpointing

    with device.megatron():
        loaded = dist_checkpointing.load(sharded_model(chunks), str(folder))
        for i, chunk in enumerate(chunks):
            chunk.load_state_dict(loaded[f"model{i}"], strict=True)


def whole(folder: Path) -> str | None:
    """None for a checkpoint with every file in its full length, otherwise what is wrong with it. `damage` reads them."""
    return manifest.missing(folder)


def _unfitting(folder: Path, tensors: dict[str, Any], grid: Grid) -> list[str]:
    """Tensors that the checkpoint lacks, has beyond those wanted, or has with another shape or dtype; by name and file."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess

    own: dict[str, tuple[tuple[int, ...] | None, str]] = {}
    for value in nested_values(load_preprocess(tensors)[0]):
        if isinstance(value, ShardedTensor):
            # Rows that pad the vocabulary to the layout may be more or fewer.
            shape = None if value.allow_shape_mismatch else tuple(value.global_shape)
            own[value.key] = (shape, str(value.dtype).removeprefix("torch."))
        elif isinstance(value, ShardedObject):
            own[value.unique_key] = (None, "object")
    wanted: dict[str, tuple[tuple[int, ...] | None, str]] = {}
    for part in grid.all_gather(own):
        wanted |= part
    try:
        found, pieces = manifest.read_tensors(folder)
    except ValueError as error:
        return [str(error)]
    files = {piece.name: piece.file for piece in reversed(pieces)}
    problems = [f"it has no tensor {name}" for name in sorted(wanted.keys() - found.keys())]
    problems += [
        f"{files.get(name, '?')} has tensor {name}, which the model has not" for name in sorted(found.keys() - wanted)
    ]
    for name in sorted(wanted.keys() & found.keys()):
        (shape, dtype), tensor = wanted[name], found[name]
        if dtype != tensor.dtype:
            problems.append(f"tensor {name} in {files.get(name, '?')} is {tensor.dtype}, the model wants {dtype}")
        elif shape is not None and shape != tensor.shape:
            problems.append(
                f"tensor {name} in {files.get(name, '?')} has the shape {list(tensor.shape)}, the model wants {list(shape)}"
            )
    return problems


def _regrouped(loaded: dict[Any, Any], requested: dict[Any, Any], common: dict[Any, Any]) -> dict[Any, Any]:
    """The optimizer's loaded state where it was saved by another number of Megatron's optimizers.

    With expert parallelism there is one for dense and one for expert parameters, without it one for both. Their tensors have
    the same names, but groups of parameters and the number of steps, which is the same for all, were saved per optimizer.
    """

    def numbers(state: dict[Any, Any]) -> list[int]:
        return sorted(key for key in state if isinstance(key, int))

    if numbers(requested) == numbers(common):
        return loaded
    [step] = {float(step) for step in _steps(common)}
    if not numbers(requested):
        return _with_groups(
            {key: value for key, value in loaded.items() if key not in numbers(common)}, requested, step
        )
    return {number: _with_groups(loaded[number], requested[number], step) for number in numbers(requested)}


def _steps(state: Any) -> Iterator[Any]:
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


def _with_groups(loaded: dict[Any, Any], requested: dict[Any, Any], step: float) -> dict[Any, Any]:
    """Loaded tensors, with the groups of the optimizer that asked for them and the number of steps."""
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

    result = dict(loaded)
    for key, value in requested.items():
        if key == "param_groups":
            groups = [
                {k: v.unwrap() if isinstance(v, LocalNonpersistentObject) else v for k, v in group.items()}
                for group in value
            ]
            result[key] = [group | ({"step": step} if "step" in group else {}) for group in groups]
        elif key == "optimizer":
            result[key] = _with_groups(loaded.get(key, {}), value, step)
        elif key == "state":
            result[key] = loaded[key] | {"common_step": torch.tensor(step)}
        elif key not in result and not isinstance(value, ShardedBase | dict | list):
            result[key] = value
    return result


@contextlib.contextmanager
def _keeping_adam_steps() -> Iterator[None]:
    """Lets Megatron-Core 0.16's distributed optimizer load the state of torch's Adam.

    The number of steps comes with the parameter groups. Reading the tensors of a parameter, Megatron leaves `step` out, as
    for the fused Adam of Transformer Engine, and then asks for it.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, place = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        kept = {"step": state["step"]} if "step" in state else {}
        original(self, model_param, kept | tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step
    try:
        yield
    finally:
        DistributedOptimizer._set_main_param_and_optimizer_states = original


def _separate_adam_steps(optimizer: Any) -> None:
    """A step counter of its own for every parameter: Megatron gives all of them one tensor, and torch's Adam, which adds 1
    to it per parameter, would count hundreds of steps at each."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in part.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()


def read_state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "state.json").read_text())


def choose(root: Path, grid: Grid, pass_over: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is whole to the last byte; every rank calls it and reads its share.

    `pass_over` hears of each that is not, by name and reason.
    """
    for folder in grid.broadcast(all_checkpoints(root)):
        problems = damage(folder, grid)
        if not problems:
            return folder
        pass_over(f"passing over {folder.name}: {shown(problems)}")
    return None


def damage(folder: Path, grid: Grid) -> list[str]:
    """What is wrong with a checkpoint, by file and tensor; all of it is read, by all ranks together."""
    return list(
        dict.fromkeys(p for part in grid.all_gather(manifest.damage(folder, grid.rank, grid.world)) for p in part)
    )


def shown(problems: list[str]) -> str:
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
    """The newest checkpoint with all its files in full length."""
    return next((folder for folder in all_checkpoints(root) if whole(folder) is None), None)


def keep(root: Path, newest: int, best: int = 0, score: str | None = None) -> None:
    """Removes all but the `newest` newest checkpoints and the `best` with the highest `score` (of equal ones the newer), and
    what an interrupted save left behind."""
    folders = all_checkpoints(root)
    kept = set(folders[:newest])
    if best and score is not None:
        scored = [
            (value, step_of(folder), folder) for folder in folders if (value := score_of(folder, score)) is not None
        ]
        kept |= {folder for _, _, folder in sorted(scored, reverse=True)[:best]}
    unwanted = [folder for folder in folders if folder not in kept]
    for folder in [*unwanted, *root.glob(".step_*.writing"), *root.glob(".step_*.old")]:
        shutil.rmtree(folder, ignore_errors=True)


def score_of(folder: Path, score: str) -> float | None:
    """An evaluation's number recorded with the checkpoint; None where there was no evaluation at its step."""
    try:
        scores: Mapping[str, float] = read_state(folder).get("scores", {})
    except (OSError, ValueError):
        return None
    return scores.get(score)
