"""Checkpoints on disk: written under another name, made current by one rename, listed in a manifest with sizes.

A folder `step_<n>` exists only if everything in it was written; `manifest.json` says what that is, and a checkpoint that does
not match its manifest is passed over by name.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.runtime import device
from megatron_rl.runtime.distributed import Grid

_STEP = re.compile(r"step_(\d+)")
# Optimizer state is stored whole per parameter, so that it loads at any data-parallel size.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which, why, and what still stands."""


def save(root: Path, step: int, chunks: list[Any], optimizer: Any, state: dict[str, Any], grid: Grid) -> Path:
    """Writes `root/step_<step>`; every rank calls it.

    Args:
        chunks: Megatron model chunks of this rank.
        state: JSON-serialisable; the same on every rank.

    Raises:
        CheckpointError: on every rank, if any rank could not write. What was written is removed.
    """
    final, temporary = root / f"step_{step}", root / f".step_{step}.writing"
    # Every rank learns what rank 0 could not do before any of them waits for the others in a save.
    error: str | None = grid.broadcast(_make_empty(temporary) if grid.is_main else None)
    if error is None:
        try:
            with device.megatron():
                tensors = _sharded_state(chunks, optimizer, loading=False)
                _check_space(root, tensors, grid)
                _save_tensors(tensors, temporary)
        except (OSError, RuntimeError, CheckpointException) as failure:
            error = _reason(failure, root)
        error = next((e for e in grid.all_gather(error) if e), None)
    if error is None and grid.is_main:
        error = _finish(temporary, final, state)
    error = grid.broadcast(error)
    if error is not None:
        if grid.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        last = newest(root)
        raise CheckpointError(
            f"could not save {final}: {error}. "
            + (f"The last whole checkpoint is {last.name}; " if last else "There is no earlier checkpoint; ")
            + "make room or change checkpoint.every, then run the same command to continue"
        )
    return final


def _make_empty(folder: Path) -> str | None:
    """Makes a folder anew. Returns what went wrong, if anything."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as failure:
        return str(failure)
    return None


def _reason(failure: BaseException, root: Path) -> str:
    """What went wrong in a save, in one line: torch puts the traceback of every rank into its message."""
    if isinstance(failure, CheckpointError):
        return str(failure)
    causes: list[BaseException] = (
        [cause for cause, _ in failure.failures.values()] if isinstance(failure, CheckpointException) else [failure]
    )
    texts = dict.fromkeys(f"{type(cause).__name__}: {cause}" for cause in causes)
    free = shutil.disk_usage(root).free / 2**30
    return f"writing failed with {'; '.join(texts)} ({root} has {free:.2f} GiB free)"


def _finish(temporary: Path, final: Path, state: dict[str, Any]) -> str | None:
    """Rank 0: state, manifest, rename. Returns what went wrong, if anything."""
    try:
        _write_json(temporary / "state.json", state)
        files = {
            str(path.relative_to(temporary)): path.stat().st_size
            for path in sorted(temporary.rglob("*"))
            if path.is_file()
        }
        _write_json(temporary / "manifest.json", {"files": files})
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
    except OSError as failure:
        return str(failure)
    return None


def load(folder: Path, chunks: list[Any], optimizer: Any) -> None:
    """Fills the model chunks and the optimizer from `folder`, whatever layout it was saved at; every rank calls it."""
    from megatron.core import dist_checkpointing

    with device.megatron():
        tensors = _sharded_state(chunks, optimizer, loading=True)
        loaded = dist_checkpointing.load(tensors, str(folder))
        for i, chunk in enumerate(chunks):
            chunk.load_state_dict(loaded[f"model{i}"], strict=True)
        with _keeping_adam_steps():
            optimizer.load_state_dict(loaded["optimizer"])
    _separate_adam_steps(optimizer)


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


def whole(folder: Path) -> str | None:
    """None for a checkpoint that is all there, otherwise what is wrong with it."""
    try:
        files = json.loads((folder / "manifest.json").read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"its manifest cannot be read ({error})"
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, {size} were written"
    return None


def all_checkpoints(root: Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    found = [path for path in root.glob("step_*") if _STEP.fullmatch(path.name)] if root.is_dir() else []
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    match = _STEP.fullmatch(folder.name)
    assert match is not None
    return int(match[1])


def newest(root: Path) -> Path | None:
    """The newest whole checkpoint."""
    return next((folder for folder in all_checkpoints(root) if whole(folder) is None), None)


def keep_newest(root: Path, count: int) -> None:
    """Removes all but the `count` newest checkpoints, and what an interrupted save left behind."""
    for folder in [*all_checkpoints(root)[count:], *root.glob(".step_*.writing")]:
        shutil.rmtree(folder, ignore_errors=True)


def _sharded_state(chunks: list[Any], optimizer: Any, loading: bool) -> dict[str, Any]:
    metadata = dict(_METADATA)
    model = {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)}
    # The optimizer wants one flat dictionary of the model's tensors to find its own by.
    flat = model["model0"] if len(chunks) == 1 else model
    return model | {"optimizer": optimizer.sharded_state_dict(flat, is_loading=loading, metadata=metadata)}


def _save_tensors(tensors: dict[str, Any], folder: Path) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    dist_checkpointing.save(tensors, str(folder), strategy)


def _check_space(root: Path, tensors: dict[str, Any], grid: Grid) -> None:
    """Refuses a save that cannot fit, before anything is written."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    own = sum(
        value.data.numel() * value.data.element_size()
        for value in nested_values(tensors)
        if isinstance(getattr(value, "data", None), torch.Tensor)
    )
    needed, free = sum(grid.all_gather(own)), shutil.disk_usage(root).free
    if needed > free:
        raise CheckpointError(f"it needs up to {needed / 2**30:.2f} GiB and {root} has {free / 2**30:.2f} GiB free")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with path.open("w") as file:
        json.dump(content, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
