"""This process's Megatron parameters -> full Hugging Face tensors on every process, bucket by bucket.

However many tensors it holds, a bucket takes one all-gather over the tensor-parallel group, two for experts, and at
most three broadcasts per pipeline stage in it. Memory beyond the model's is about three times the size of the bucket
(or of the largest tensor, where that is larger).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor
from torch import Tensor, nn

from megatron_rl.models.family import Family, Model
from megatron_rl.models.hf_config import HFConfig
from megatron_rl.models.rules import Dims, Rule, shard_slices
from megatron_rl.weights.adapters import merged
from megatron_rl.weights.inventory import Key, LocalWeight, local_experts, local_weights, split_axis
from megatron_rl.weights.layouts import layers_of
from megatron_rl.weights.load_hf import weight_dims
from megatron_rl.weights.parallel import Axis, ParallelGroups

BUCKET_BYTES = 256 * 2**20
_ALIGNMENT = 16  # bytes; lets a flat buffer be viewed as any dtype


@dataclass(frozen=True)
class _Task:
    """One parameter to gather; in the same order on every process. `rule` still has its name's placeholders."""

    key: Key
    rule: Rule
    stage: int  # pipeline rank that holds it
    shape: tuple[int, ...]  # of one shard
    dtype: torch.dtype
    dims: Dims

    @property
    def nbytes(self) -> int:
        """Bytes of one shard in the flat buffer."""
        return -(-tensor_bytes(self.shape, self.dtype) // _ALIGNMENT) * _ALIGNMENT


@torch.no_grad()
def iter_hf_weights(
    model_chunks: Sequence[nn.Module],
    family: Family,
    hf_config: HFConfig,
    parallel: ParallelGroups,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of the model as (Hugging Face name, full tensor), on every process, in the same order.

    A collective: all processes of the tensor-, pipeline- and expert-parallel groups must exhaust the iterator. Tensors
    have the parameters' dtype (FP8 parameters are dequantised) and device; vocabulary padding is gone, a tied output
    layer does not appear. A yielded tensor may be a view of a parameter or of the bucket: copy it to keep it.
    `bucket_bytes`: how many bytes of full tensors are gathered at once (one tensor at least).
    """
    model = Model(family, family.describe(hf_config))
    local = {weight.key: weight for weight in local_weights(model_chunks, model, parallel)}
    tasks = _plan(local, model, parallel)
    device = next(iter(local.values())).parameter.device
    for bucket in _buckets(tasks, parallel, bucket_bytes):
        yield from _gather(bucket, local, local_experts(model, parallel), parallel, device)


def _plan(local: dict[Key, LocalWeight], model: Model, parallel: ParallelGroups) -> list[_Task]:
    """All parameters of the model in file order, with the stage that holds each."""
    mine = [
        (weight.key, tuple(weight.parameter.shape), weight.parameter.dtype)
        for weight in local.values()
        if not (model.description.tied and model.family.rules[weight.key[0]].is_output)
    ]
    stages = [mine]
    if parallel.pp.size > 1:
        stages = [[]] * parallel.pp.size
        dist.all_gather_object(stages, mine, group=parallel.pp.group)
    tasks = []
    for stage, held in enumerate(stages):
        for key, shape, dtype in held:
            rule = model.family.rules[key[0]]
            tp = split_axis(rule, parallel).size
            tasks.append(_Task(key, rule, stage, shape, dtype, weight_dims(shape, rule, model.dims, tp)))

    def order(task: _Task) -> tuple[int, int, int, int]:
        index, layer, expert = task.key
        return (task.rule.place, layer, expert, index)

    tasks.sort(key=order)
    for before, after in pairwise(tasks):
        if before.key == after.key:
            raise ValueError(f"pipeline stages {before.stage} and {after.stage} both hold {after.rule.megatron[0]}")
    experts = local_experts(model, parallel)
    expected = sum(len(layers_of(model, rule)) * (experts if rule.per_expert else 1) for rule in model.parameters)
    if len(tasks) != expected:
        raise ValueError(f"the pipeline stages hold {len(tasks)} of the model's {expected} parameters")
    return tasks


def _buckets(tasks: Sequence[_Task], parallel: ParallelGroups, limit: int) -> Iterator[list[_Task]]:
    bucket: list[_Task] = []
    size = 0
    for task in tasks:
        copies = split_axis(task.rule, parallel).size * (parallel.ep.size if task.rule.per_expert else 1)
        full = task.nbytes * (copies if task.rule.is_cut else 1)
        if bucket and size + full > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(task)
        size += full
    if bucket:
        yield bucket


def _gather(
    bucket: Sequence[_Task],
    local: dict[Key, LocalWeight],
    experts: int,
    parallel: ParallelGroups,
    device: torch.device,
) -> Iterator[tuple[str, Tensor]]:
    shards: dict[Key, list[list[Tensor]]] = {}  # by expert-parallel rank, by tensor-parallel rank
    classes = (
        ([task for task in bucket if task.rule.per_expert], (parallel.expert_tp, parallel.ep)),
        (
            [task for task in bucket if not task.rule.per_expert and task.rule.is_cut],
            (parallel.tp,),
        ),
        ([task for task in bucket if not task.rule.per_expert and not task.rule.is_cut], ()),
    )
    for tasks, axes in classes:
        if all(axis.size == 1 for axis in (*axes, parallel.pp)):
            shards.update({task.key: [[values(local[task.key].parameter)]] for task in tasks})
        elif tasks:
            flat = _over_stages(tasks, local, parallel.pp, device)
            for axis in axes:
                flat = _over_axis(flat, axis)
            at = 0
            for task in tasks:
                rows = flat[..., at : at + tensor_bytes(task.shape, task.dtype)]
                rows = rows.reshape(-1, split_axis(task.rule, parallel).size if axes else 1, rows.shape[-1])
                shards[task.key] = [[row.view(task.dtype).view(task.shape) for row in group] for group in rows]
                at += task.nbytes
    for task in bucket:
        _, layer, expert = task.key
        for rank, group in enumerate(shards.pop(task.key)):
            yield from merge_shards(task.rule.at(layer, rank * experts + expert), group, task.dims).items()


def values(parameter: Tensor) -> Tensor:
    """A parameter's numbers: FP8 ones dequantised, those of a layer with adapters merged with what they add."""
    return merged(parameter, dequantize_fp8_tensor(parameter) if is_float8tensor(parameter) else parameter.detach())


def _over_stages(tasks: Sequence[_Task], local: dict[Key, LocalWeight], pp: Axis, device: torch.device) -> Tensor:
    """The tasks' local shards in one flat byte buffer, broadcast from the stages that hold them."""
    flat = torch.empty(sum(task.nbytes for task in tasks), dtype=torch.uint8, device=device)
    at = first = 0
    for index, task in enumerate(tasks):
        if task.stage == pp.rank:
            target = flat[at : at + tensor_bytes(task.shape, task.dtype)].view(task.dtype).view(task.shape)
            target.copy_(values(local[task.key].parameter))
        at += task.nbytes
        if pp.size > 1 and (index + 1 == len(tasks) or tasks[index + 1].stage != task.stage):
            dist.broadcast(flat[first:at], group=pp.group, group_src=task.stage)
            first = at
    return flat


def _over_axis(flat: Tensor, axis: Axis) -> Tensor:
    """[...] bytes on each process of the axis -> [axis.size, ...] on all."""
    if axis.size == 1:
        return flat[None]
    gathered = flat.new_empty((axis.size, *flat.shape))
    dist.all_gather_into_tensor(gathered.view(-1), flat.reshape(-1), group=axis.group)
    return gathered


def merge_shards(rule: Rule, shards: Sequence[Tensor], dims: Dims) -> dict[str, Tensor]:
    """The full Hugging Face tensors from the shards of all tensor-parallel ranks.

    A tensor that is one whole shard comes back as a view of it, anything else as new memory.
    """
    if not rule.is_cut and len(rule.hf) == 1:
        return {rule.hf[0].name: shards[0]}
    pieces = [shard_slices(rule, dims, rank, len(shards)) for rank in range(len(shards))]
    if len(shards) == 1 and len(rule.hf) == 1:
        return {rule.hf[0].name: shards[0].narrow(rule.dim, 0, sum(piece.length for piece in pieces[0]))}
    full = [shards[0].new_empty(tensor.sizes(dims)) for tensor in rule.hf]
    for shard, own in zip(shards, pieces, strict=True):
        at = 0
        for piece in own:
            target = full[piece.tensor].narrow(rule.dim, piece.start, piece.length)
            target.copy_(shard.narrow(rule.dim, at, piece.length))
            at += piece.length
    return {tensor.name: value for tensor, value in zip(rule.hf, full, strict=True)}


def tensor_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
