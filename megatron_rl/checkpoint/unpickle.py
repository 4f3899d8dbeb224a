"""Reads what a checkpoint holds as pickles, and makes objects of known classes only: a checkpoint cannot run code.

Torch and Megatron-Core unpickle freely in two places: the index `.metadata`, and pieces that are objects and not tensors
(Transformer Engine does it a third time, with the extra states of its layers). A pickle names the functions that it wants
called, so the author of the file would choose them. Here every name is compared with a list before it is looked up.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any, BinaryIO

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.checkpoint.index import DAMAGE, Listed, Record, UnpickleError, read_metadata, unknown
from megatron_rl.seams import torch_dist
from megatron_rl.seams.megatron import State

_KNOWN_STATES: dict[tuple[str, str], type] = {  # of an FP8 layer, as Transformer Engine writes it
    ("torch._utils", "_rebuild_tensor_v2"): Record,
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "deque"): deque,
}
# What a pickled tensor calls: torch's own loader, and the one that importing Megatron-Core puts in its place.
_STORAGES = (("torch.storage", "_load_from_bytes"), ("megatron.core.safe_globals", "safe_load_from_bytes"))
_RECIPES = "transformer_engine.common.recipe"


class _ExtraState(Listed):
    """Reads the state of a layer into stand-ins, to see what it names and that it changes no class or function."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _KNOWN_STATES:
            return _KNOWN_STATES[module, name]
        if (module, name) in _STORAGES:
            return lambda data: _load(io.BytesIO(data), self._source)
        if module == _RECIPES and "." not in name and isinstance(super().find_class(module, name), type):
            return Record
        raise unknown(self._source, f"{module}.{name}")


def load(state: State, folder: Path) -> State:
    """`dist_checkpointing.load` of a sharded state, with objects of known classes only.

    Raises:
        UnpickleError: on every rank; tensors that were read before are what the checkpoint has.
    """
    # By default Megatron-Core 0.19 reads straight into FP8 parameters. Of one that was saved in other pieces torch then cuts
    # a plain copy, reads into that, and the parameter stays as it was.
    strategy = TorchDistLoadShardedStrategy(stream_ckpt_dequant=False)
    read_metadata(folder)  # here, since torch wraps what goes wrong in it
    load_common(folder)  # Megatron-Core reads it too, and torch names neither file nor class in a sentence
    with torch_dist.loading_with(read_metadata, _load):
        try:
            loaded: State = dist_checkpointing.load(state, str(folder), strategy)
        except CheckpointException as error:
            for failure, _ in error.failures.values():
                if isinstance(failure, UnpickleError):
                    raise failure from None
            raise
    for name, values in loaded.items():
        if isinstance(values, dict):
            _check_extra_states(values, f"{folder}: {name}")
    return loaded


def load_common(folder: Path) -> State:
    """`common.pt`: everything but tensors, the same on every rank.

    Raises:
        UnpickleError: it names a class that has no place there, or is damaged.
    """
    path = folder / "common.pt"
    with path.open("rb") as file:
        common: State = _load(file, str(path))
    return common


def _load(file: BinaryIO, source: str) -> Any:
    """`torch.load` of what has tensors and plain data only, and the few classes that Megatron-Core has named to torch."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"\bGLOBAL ([\w.]+)", str(error))
        if named is None:
            raise UnpickleError(f"{source} is damaged: {str(error).splitlines()[0]}") from error
        raise unknown(source, named[1]) from None


def _check_extra_states(state: State, source: str) -> None:
    """Transformer Engine unpickles the extra states of its layers without a list; this is a look at them before.

    Raises:
        UnpickleError: one names something else than tensors, plain data and Transformer Engine's recipes.
    """
    for name, value in state.items():
        if isinstance(value, dict):
            _check_extra_states(value, source)
        if not str(name).endswith("_extra_state"):
            continue
        data = bytes(value.cpu().numpy().tobytes()) if isinstance(value, torch.Tensor) else b""
        if isinstance(value, io.BytesIO):
            _load(io.BytesIO(value.getvalue()), f"{source}.{name}")
        elif data:
            try:
                _ExtraState(io.BytesIO(data), f"{source}.{name}").load()
            except UnpickleError:
                raise
            except DAMAGE as error:
                raise UnpickleError(f"{source}.{name} cannot be read: {error!r}") from error
