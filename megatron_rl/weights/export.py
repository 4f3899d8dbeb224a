"""Megatron parameters -> a Hugging Face folder that `transformers` and vLLM load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_rl.models.family import Family, Model
from megatron_rl.models.hf_config import HFConfig, unquantised, with_dtype
from megatron_rl.models.lora import peft_config
from megatron_rl.weights.files import copy_companions, save_tensors, shard_names, whole_folder, write_index, write_json
from megatron_rl.weights.gather import iter_hf_weights
from megatron_rl.weights.parallel import ParallelGroups
from megatron_rl.weights.stacked import stacked

if TYPE_CHECKING:
    from megatron_rl.config.actor import LoRAConfig

SHARD_BYTES = 5 * 10**9


def export_hf(
    folder: str | Path,
    model_chunks: Sequence[nn.Module],
    family: Family,
    hf_config: HFConfig,
    parallel: ParallelGroups,
    source_folder: str | Path,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the model as a Hugging Face folder: safetensors, index, config.json, and the source folder's tokenizer,
    generation config and chat template.

    A collective over all processes. One of them writes, under a temporary name that becomes `folder` (replacing it)
    once it is whole. Weights keep the parameters' dtype, which config.json then states.

    Raises:
        RuntimeError: writing failed (no space, no permission); raised on every process.
    """
    experts = family.describe(hf_config).experts
    weights = stacked(
        iter_hf_weights(model_chunks, family, hf_config, parallel), family.stacking, experts.count if experts else 0
    )
    write = partial(_write, weights=weights, hf_config=hf_config, source=Path(source_folder), shard_bytes=shard_bytes)
    _export(folder, weights, parallel, write)


def export_peft(
    folder: str | Path,
    model_chunks: Sequence[nn.Module],
    adapters: Model,
    lora: LoRAConfig,
    hf_config: HFConfig,
    parallel: ParallelGroups,
    base: str | Path,
) -> None:
    """Write the adapters as a folder that PEFT and vLLM load: adapter_config.json, which names the Hugging Face folder
    `base` that they belong to, and adapter_model.safetensors. Otherwise as `export_hf`."""
    weights = iter_hf_weights(model_chunks, adapters.family, hf_config, parallel)

    def write(temporary: Path) -> None:
        values = {name: value.to("cpu", copy=True, memory_format=torch.contiguous_format) for name, value in weights}
        save_tensors(temporary / "adapter_model.safetensors", values)
        write_json(temporary / "adapter_config.json", peft_config(lora, values, str(base)))

    _export(folder, weights, parallel, write)


def _export(
    folder: str | Path,
    weights: Iterator[tuple[str, Tensor]],
    parallel: ParallelGroups,
    write: Callable[[Path], None],
) -> None:
    """Makes the writing process `write` a new folder, which exhausts `weights`, while the others take part."""
    problem: str | None = None
    if parallel.is_writer:
        try:
            with whole_folder(folder) as temporary:
                write(temporary)
        except OSError as error:
            problem = f"export to {folder} failed: {error}"
    # Experts may lie on ranks of several replicas; without them, other replicas' groups would gather what nothing reads.
    if parallel.dp.rank == 0 or max(parallel.ep.size, parallel.expert_tp.size) > 1:
        for _ in weights:  # of processes that don't write, and what a failed writer left: all take part to the end
            pass
    if dist.is_initialized():
        shared = [problem]
        dist.broadcast_object_list(shared, src=0)
        problem = shared[0]
    if problem:
        raise RuntimeError(problem)


def _write(
    folder: Path, weights: Iterator[tuple[str, Tensor]], hf_config: HFConfig, source: Path, shard_bytes: int
) -> None:
    shards: list[list[str]] = []
    waiting: dict[str, Tensor] = {}
    size = total = 0
    dtypes: set[torch.dtype] = set()

    def flush() -> None:
        nonlocal size
        save_tensors(folder / f"{len(shards)}.safetensors", waiting)
        shards.append(list(waiting))
        waiting.clear()
        size = 0

    for name, value in weights:
        if waiting and size + value.nbytes > shard_bytes:
            flush()
        waiting[name] = value.to("cpu", copy=True, memory_format=torch.contiguous_format)
        size, total = size + value.nbytes, total + value.nbytes
        dtypes.add(value.dtype)
    flush()
    files = shard_names(len(shards))
    write_index(folder, dict(zip(files, shards, strict=True)), total)
    for number, file in enumerate(files):
        (folder / f"{number}.safetensors").rename(folder / file)
    one = len(dtypes) == 1
    config = with_dtype(hf_config, str(dtypes.pop()).removeprefix("torch.")) if one else unquantised(hf_config)
    write_json(folder / "config.json", config)
    copy_companions(source, folder)
