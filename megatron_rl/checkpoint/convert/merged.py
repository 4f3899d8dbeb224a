"""A training checkpoint of LoRA's adapters: read as a whole model together with its base, or written as PEFT's folder."""

from __future__ import annotations

from collections.abc import Container, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron_rl.checkpoint import manifest
from megatron_rl.checkpoint.convert.global_tensors import Memory, TorchDist
from megatron_rl.checkpoint.convert.reader import MegatronModel
from megatron_rl.checkpoint.convert.source import SourceModel, open_weights, weights_checksum
from megatron_rl.config.actor import LoRAConfig
from megatron_rl.models.lora import PEFT_PREFIX, matrix_of, peft_config
from megatron_rl.weights.files import (
    DTYPE_NAMES,
    DTYPES,
    Bits,
    WeightSource,
    as_bits,
    as_tensor,
    save_tensors,
    whole_folder,
    write_json,
)

if TYPE_CHECKING:
    from torch import Tensor


class _Pair(NamedTuple):
    inner: str  # A's name in the checkpoint
    outer: str


class _Adapters:
    """The pairs of a checkpoint, by the name of the matrix that they are added to, one of `base`."""

    def __init__(self, folder: Path, base: Container[str] = ()) -> None:
        self._stored = TorchDist(folder)
        self.names = sorted(name for name in self._stored.tensors if name.startswith(PEFT_PREFIX))
        inner = [name for name in self.names if name.endswith(".lora_A.weight")]
        self.pairs = {matrix_of(name, base): _Pair(name, name.replace(".lora_A.", ".lora_B.")) for name in inner}
        self.dtype = DTYPE_NAMES[self._stored.tensors[self.names[0]].dtype]

    def read(self, name: str) -> Tensor:
        out = np.empty(self._stored.tensors[name].shape, self._stored.bits(name))
        self._stored.read(name, (), (0,) * out.ndim, out)
        return as_tensor(out, self.dtype)


class MergedModel(WeightSource):
    """The model that adapters and their base are together, as a run's own export has it: W + scale · BA, summed in fp32 and
    rounded to the adapters' dtype.

    Raises:
        ValueError: `base` holds other weights than those beside which the adapters were trained.
    """

    def __init__(self, folder: Path, base: Path) -> None:
        about = manifest.read(folder)["adapters"]
        if weights_checksum(base) != about["base_weights"]:
            raise ValueError(
                f"{folder} has adapters of another model: they were trained beside {about['base']}, whose weights are not "
                f"those of {base}; name its folder with --config"
            )
        self.folder, self._scale = folder, about["scale"]
        self._base = open_weights(base)
        self._adapters = _Adapters(folder, self._base.names())
        self.tensors = {name: (self._base.shape(name), self._adapters.dtype) for name in self._base.names()}

    def file_of(self, name: str) -> Path:
        return self._base.file_of(name)

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        import torch

        values = self._base.read(name, dim, start, stop).to(getattr(torch, DTYPES[self._adapters.dtype].name))
        pair = self._adapters.pairs.get(name)
        if pair is None:
            return values
        inner, outer = (self._adapters.read(each).float() for each in pair)
        added = self._scale * (outer @ inner)
        return (values.float() + added.narrow(dim, start, values.shape[dim])).to(values.dtype)

    def read_into(self, out: Bits, name: str, dim: int = 0, start: int = 0) -> None:
        out[...] = as_bits(self.read(name, dim, start, start + out.shape[dim]))

    def parts(self, name: str, memory: Memory) -> Iterator[Bits]:
        yield as_bits(self.read(name, 0, 0, self.shape(name)[0]))


def has_adapters(checkpoint: Path) -> bool:
    return (checkpoint / manifest.MANIFEST).is_file() and bool(manifest.read(checkpoint).get("adapters"))


def stored_model(
    folder: Path, model: SourceModel, any_padding: bool = False, master: bool = False
) -> MegatronModel | MergedModel:
    """A checkpoint as a whole model; one of adapters, with their base in `model.folder`. See `MegatronModel`."""
    if not has_adapters(folder):
        return MegatronModel(folder, model, any_padding, master)
    if master:
        raise ValueError(f"--master-weights: {folder} has adapters, whose base has no fp32 weights; leave it out")
    return MergedModel(folder, model.folder)


def write_peft(checkpoint: Path, target: Path) -> int:
    """Writes the adapters of a checkpoint as a folder that PEFT, vLLM and `actor.lora.path` load; how many tensors.

    Raises:
        ValueError: the checkpoint has none, or `target` exists.
    """
    if not has_adapters(checkpoint):
        raise ValueError(f"--adapter: {checkpoint} is a whole model and has no adapters; leave it out")
    if target.exists():
        raise ValueError(f"{target} exists; remove it or choose another folder")
    about, adapters = manifest.read(checkpoint)["adapters"], _Adapters(checkpoint)
    rank = about["rank"]
    lora = LoRAConfig(rank=rank, alpha=about["scale"] * rank, targets=about["modules"], experts=about["experts"])
    with whole_folder(target) as temporary:
        save_tensors(temporary / "adapter_model.safetensors", {name: adapters.read(name) for name in adapters.names})
        write_json(temporary / "adapter_config.json", peft_config(lora, adapters.names, about["base"]))
    return len(adapters.names)
