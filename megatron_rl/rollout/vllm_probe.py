"""Diagnosis of a vLLM engine: what it holds and computes with, beside what a weight sync should have brought."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from megatron_rl.rollout.vllm_engine import VllmEngine
from megatron_rl.runtime import device
from megatron_rl.runtime.distributed import ProcessGrid
from megatron_rl.seams import vllm as seam


class VllmProbe:
    """Looks into this rank's part of an engine; an `EngineProbe`."""

    def __init__(self, engine: VllmEngine, grid: ProcessGrid) -> None:
        self._engine, self._grid = engine, grid

    def parameters(self) -> dict[str, Tensor]:
        """The engine's parameters on this rank, and views of their parts, by Hugging Face name."""
        [named] = self._engine.llm.apply_model(lambda model: dict(model.named_parameters()) | seam.parts(model))
        return _by_hf_name(named)

    def packed_weights(self) -> dict[str, Callable[[], Tensor]]:
        """CPU: what reads a linear layer's weight back from its kernel's copy on this rank, by Hugging Face name."""
        [readers] = self._engine.llm.apply_model(seam.weights)
        return _by_hf_name(readers)

    def stale_layers(self) -> list[str]:
        """CPU: layers whose kernel's copy of a weight is not the weight that they hold on this rank."""
        [names] = self._engine.llm.apply_model(seam.stale_layers)
        return names

    def drop_cache(self) -> None:
        """GPU: leaves the weights of an engine that is awake only. It generates no more: what wakes it loads new weights."""
        if device.has_gpu():
            self._engine.llm.sleep(level=1)
            self._engine.llm.wake_up(tags=["weights"])

    def first_difference(self, weights: Iterable[tuple[str, Tensor]]) -> str | None:
        first, parameters, packed = None, self.parameters(), self.packed_weights()
        engine = self._grid.engine
        for name, tensor in self._engine.stored(weights):
            loaded = packed[name]() if name in packed else parameters.get(name)
            if first is None and loaded is not None and not is_shard(loaded, tensor, engine.rank, engine.size):
                first = name
        if first := next((name for name in self._grid.all_gather(first) if name), None):
            copy = ", in the copy that vLLM packs for the CPU's kernels" if first in packed else ""
            return (
                "Every tensor was sent as the actor holds it; the first that the engine holds otherwise is "
                f"{first}{copy}."
            )
        stale = [name for names in self._grid.all_gather(self.stale_layers()) for name in names]
        if stale:
            return (
                f"Every tensor was sent and is held as the actor has it, but the engine's layer {stale[0]} computes "
                "with something else: the copy of its weight that vLLM packs for the CPU's kernels, which this sync has not "
                "refreshed (megatron_rl/seams/vllm.py)."
            )
        return None


def is_shard(shard: Tensor, full: Tensor, rank: int, ranks: int) -> bool:
    """Whether `shard` is the tensor, or the shard of it along either dimension that one of `ranks` ranks has.

    Rows may be padded; where there are fewer shards than ranks (key and value heads), neighbouring ranks have the same one.
    True for a tensor that is kept in another form: nothing can be said of it.
    """
    if shard.dim() != full.dim():
        return True
    if shard.dtype == full.dtype and shard.dtype.itemsize == 1:  # torch compares no FP8
        shard, full = shard.view(torch.uint8), full.view(torch.uint8)
    if shard.shape == full.shape:
        return bool(torch.equal(shard, full.to(shard.dtype)))
    for dim in range(full.dim()):
        size = shard.shape[dim]
        shards = -(-full.shape[dim] // size)
        for begin in {rank * size, rank * shards // ranks * size}:
            part = full.narrow(dim, min(begin, full.shape[dim]), max(0, min(size, full.shape[dim] - begin)))
            mine = shard.narrow(dim, 0, part.shape[dim])
            if mine.shape == part.shape and torch.equal(mine, part.to(shard.dtype)):
                return True
    return False


def _by_hf_name[T](named: dict[str, T]) -> dict[str, T]:
    """vLLM puts the decoder of a model that reads images a level down, whose name files have after `model` or not at all."""
    result = dict[str, T]()
    for name, value in named.items():
        result[name.removeprefix("language_model.")] = value
        if name.startswith("language_model.model."):
            result["model.language_model." + name.removeprefix("language_model.model.")] = value
        elif name.startswith("visual."):
            result[f"model.{name}"] = value
    return result
