"""Hugging Face folder -> this process's Megatron parameters, reading only the slices that it holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor, nn

from megatron_rl.models.classifier import SCORE
from megatron_rl.models.family import Family, Model
from megatron_rl.models.hf_config import HFConfig
from megatron_rl.models.rules import Dims, Rule, Sharding, shard_shape, shard_slices
from megatron_rl.seams.transformer_engine import keep_exact
from megatron_rl.weights.check_files import check_names, check_tensors, check_tied
from megatron_rl.weights.files import SafetensorsFolder, WeightSource
from megatron_rl.weights.inventory import LocalWeight, local_weights, split_axis
from megatron_rl.weights.parallel import ParallelGroups
from megatron_rl.weights.stacked import opened


@torch.no_grad()
def load_hf_weights(
    model_chunks: Sequence[nn.Module],
    family: Family,
    hf_config: HFConfig,
    source: str | Path | WeightSource,
    parallel: ParallelGroups,
) -> None:
    """Fill the parameters of this process's model chunks, in place and in their own dtype, from a Hugging Face folder
    (or another source of weights under Hugging Face names).

    No communication: every process reads its own slices. Rows that pad the vocabulary become zero.

    Raises:
        ValueError: a tensor is missing, unexpected or of another shape than the config says (the message names tensor
            and field), or the module is not the one that the family's config mapping describes.
    """
    model = Model(family, family.describe(hf_config))
    files = opened(SafetensorsFolder(source), family) if isinstance(source, str | Path) else source
    check_names(files, model)
    for weight in local_weights(model_chunks, model, parallel):
        axis = split_axis(weight.rule, parallel)
        dims = weight_dims(tuple(weight.parameter.shape), weight.rule, model.dims, axis.size)
        check_tensors(weight.rule, files, model)
        _fill(weight, files, dims, axis.rank, axis.size)
    check_tied(files, model)


def weight_dims(shape: tuple[int, ...], rule: Rule, dims: Dims, tp: int) -> Dims:
    """The sizes that a rule works with for a parameter of this shape, from which the padding of the vocabulary is read.

    Raises:
        ValueError: the shape is not the one that the config gives for one of `tp` shards.
    """
    if rule.sharding is Sharding.VOCAB:
        dims = {**dims, "padded_vocab": shape[0] * tp}
        if shape[0] * tp < dims["vocab"]:
            raise ValueError(
                f"{rule.megatron[0]} holds {shape[0]} rows on each of {tp} ranks, "
                f"too few for vocab_size = {dims['vocab']}"
            )
    expected = shard_shape(rule, dims, tp)
    if shape != expected:
        raise ValueError(
            f"parameter {rule.megatron[0]} has shape {shape}, but the config makes it {expected} "
            f"with {tp} tensor-parallel ranks"
        )
    return dims


def _fill(weight: LocalWeight, files: WeightSource, dims: Dims, rank: int, tp: int) -> None:
    rule, target = weight.rule, _writable(weight.parameter)
    at = 0
    for piece in shard_slices(rule, dims, rank, tp):
        source = files.read(rule.hf[piece.tensor].name, rule.dim, piece.start, piece.stop)
        target.narrow(rule.dim, at, piece.length).copy_(source)
        at += piece.length
    target.narrow(rule.dim, at, target.shape[rule.dim] - at).zero_()
    if target is not weight.parameter:
        weight.parameter.copy_(target)  # quantises
        keep_exact(weight.parameter, target)


def _writable(parameter: Tensor) -> Tensor:
    """The parameter, or a plain tensor to assemble it in where its storage is FP8 and cannot be written piecewise."""
    if is_float8tensor(parameter):
        return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    return parameter


class WithHead(WeightSource):
    """A policy's weights, its output layer replaced by a new head: normal, of variance 1 / (hidden size + 1).

    Stiennon et al. 2020, Learning to summarize from human feedback, draw the head so.
    """

    def __init__(self, source: WeightSource, model: Model, seed: int) -> None:
        self.folder = source.folder
        self._source, self._seed = source, seed
        self._name, self._shape = SCORE.hf[0].name, (1, model.dims["hidden"])
        kept = source.names() - {model.family.output.hf[0].name}
        self.tensors = {name: (source.shape(name), source.dtype(name)) for name in kept}
        self.tensors[self._name] = (self._shape, "F32")

    def file_of(self, name: str) -> Path:
        return self.folder if name == self._name else self._source.file_of(name)

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        if name != self._name:
            return self._source.read(name, dim, start, stop)
        generator = torch.Generator().manual_seed(self._seed)
        head = torch.randn(self._shape, generator=generator) / math.sqrt(self._shape[1] + 1)
        return head.narrow(dim, start, stop - start)
