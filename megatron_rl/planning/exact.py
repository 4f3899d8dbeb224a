"""Memory of each rank of a layout, counted on the modules of Megatron-Core themselves, without the hardware.

A rank of each pipeline stage is built by the product's own code in a world that torch pretends, on tensors without content.
The largest micro-batch then runs through it, forwards and backwards, and every tensor is counted while it lives. What
Megatron-Core refuses is refused here, in its words.

The layers are the plain ones, with norms, SwiGLU and attention that keep for the backward pass what Transformer Engine's
kernels keep. Experts get equal shares of the tokens.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import cast

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_rl.actor import build
from megatron_rl.actor.actor import Actor
from megatron_rl.actor.packing import MicroBatch
from megatron_rl.actor.routing import is_bias
from megatron_rl.base.messages import errors_named
from megatron_rl.config.actor import ActorConfig, FP8Config, Recomputed
from megatron_rl.config.pipeline_split import stage_numbers
from megatron_rl.config.schema import Config
from megatron_rl.models import HFConfig, Model, model_of
from megatron_rl.modules.layers import PackedAttention, SequenceParallelRMSNorm
from megatron_rl.planning.components import MemoryPlan, Part
from megatron_rl.planning.dummy_inputs import Zeros, largest_micro_batch, whole_windows
from megatron_rl.runtime import device, distributed
from megatron_rl.runtime.host_memory import pinned_bytes
from megatron_rl.seams.fp8_sizes import weight_bytes
from megatron_rl.seams.megatron import PER_ELEMENT, Chunk, optimizer_parts, routers, tensors_of
from megatron_rl.seams.megatron_meta import fused_kernels, under_way
from megatron_rl.seams.meta_fp8 import quantised_layers, quantised_weights
from megatron_rl.seams.torch_meta import StorageCounter, fake_world, storage_key
from megatron_rl.weights import sync_plan as reshard
from megatron_rl.weights.inventory import unwrap
from megatron_rl.weights.layouts import ActorLayout, EngineLayout, unplaced
from megatron_rl.weights.sync_plan import BUCKET_BYTES

META = torch.device("meta")


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank, and of the ranks that are like it."""

    rank: int
    ranks: int  # like it: those that follow it, itself included
    stage: int
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    fp8_bytes: int = 0  # copies of weights in FP8, which stay from the first forward pass on
    # At the most, beside the three above:
    load_bytes: int = 0  # until the optimizer is there
    forward_bytes: int = 0  # in a forward pass alone, over the largest micro-batch
    update_bytes: int = 0  # in the forward and backward passes of an optimizer step
    check_bytes: int = 0  # in a forward pass alone, over the rollouts of the sync check
    sync_bytes: int | None = None  # two buckets of a weight sync in slices; None: the weights do not go so
    # Pinned on the host, where they are offloaded:
    optimizer_away_bytes: int = 0
    weights_away_bytes: int = 0


def on_rank(plan: MemoryPlan, memory: RankMemory) -> MemoryPlan:
    """The plan of a layout with what was counted on a rank in the place of the arithmetic for the fullest one."""
    counted: dict[Part, int | None] = {
        Part.WEIGHTS: memory.parameter_bytes,
        Part.GRADIENTS: memory.gradient_bytes,
        Part.OPTIMIZER: memory.optimizer_bytes,
        Part.FP8_COPIES: memory.fp8_bytes,
        Part.LOADING: memory.load_bytes,
        Part.FORWARD: memory.forward_bytes,
        Part.ACTIVATIONS: memory.update_bytes,
        Part.SYNC_CHECK: memory.check_bytes,
        Part.BUCKETS: memory.sync_bytes,
        Part.HOST_OPTIMIZER: memory.optimizer_away_bytes,
        Part.HOST_WEIGHTS: memory.weights_away_bytes,
    }
    components = tuple(
        component if (size := counted.get(component.part)) is None else replace(component, bytes=size, estimate=False)
        for component in plan.components
        if component.part is not Part.HEAD  # its workspace is part of what the passes were seen to take
    )
    return replace(plan, components=components)


@dataclass(frozen=True)
class _Chunk:
    """Bytes of one micro-batch in a model chunk: kept from its forward to its backward pass, and the most at any time."""

    kept: int
    peak: int


def _update_bytes(chunks: Sequence[_Chunk], stage: int, stages: int) -> int:
    """Bytes that the micro-batches under way keep, by Megatron-Core's schedule, and the most that another one takes."""
    kept = sum(chunks[number].kept for number in under_way(stage, stages, len(chunks)))
    return kept + max(chunk.peak for chunk in chunks)


def measure(
    config: Config, hf_config: HFConfig, world: int, node: int = 8, fused: bool = True, where: torch.device = META
) -> list[RankMemory]:
    """Every pipeline stage of a checked recipe on `world` ranks, and in it those ranks whose state is the same.

    Args:
        node: ranks of a machine.
        fused: count what Transformer Engine's kernels keep, and not what the plain layers do.
        where: the CPU, for tensors with content.

    Raises:
        ValueError: Megatron-Core refuses the layout; with its reason.
    """
    model, parallel = model_of(hf_config), config.actor.parallel
    per_stage = world // parallel.pipeline
    alike: dict[
        tuple[tuple[object, ...], bool, bool], tuple[RankMemory, list[_Chunk], list[tuple[int, int]]]
    ] = {}  # stages of the same modules
    measured = []
    buckets = _sync_bytes(config, model, world, min(node, world))
    stages = stage_numbers(model.dims["layers"], parallel.pipeline, parallel.virtual_pipeline)
    for stage, numbers in enumerate(stages):
        kinds = tuple(layer in model.expert_layers for layer in numbers)
        kind, rank = (kinds, stage == 0, stage == parallel.pipeline - 1), stage * per_stage
        if kind not in alike:
            alike[kind] = _measure_rank(config, hf_config, rank, world, fused, where)
        memory, chunks, optimizers = alike[kind]
        peak = _update_bytes(chunks, stage, parallel.pipeline)
        for _, same in groupby(optimizers, key=itemgetter(0)):
            ranks = [optimizer_bytes for _, optimizer_bytes in same]
            memory = replace(memory, rank=rank, ranks=len(ranks), stage=stage, optimizer_bytes=ranks[0])
            sync_bytes = None if buckets is None else int(buckets[rank : rank + len(ranks)].max())
            measured.append(replace(memory, update_bytes=peak, sync_bytes=sync_bytes))
            rank += len(ranks)
    return measured


def with_plain_layers(config: Config) -> Config:
    """Returns the recipe without what needs Transformer Engine or DeepEP; moments in bf16 are counted by `state_of`."""
    modules: list[Recomputed] = [module for module in config.actor.recompute_modules if module != "moe_act"]
    moe = replace(config.actor.moe, dispatcher="alltoall")
    optimizer = replace(config.actor.optimizer, moments="float32")
    actor = replace(config.actor, fp8=None, recompute_modules=modules, moe=moe, optimizer=optimizer)
    return replace(config, actor=actor)


def _measure_rank(
    config: Config, hf_config: HFConfig, rank: int, world: int, fused: bool, where: torch.device
) -> tuple[RankMemory, list[_Chunk], list[tuple[int, int]]]:
    """Memory of the first rank of a stage; and the optimizer's bytes of all ranks of the stage."""
    plain = with_plain_layers(config)
    with built_rank(plain, hf_config, rank, world, where) as (actor, memory, loaded), ExitStack() as stack:
        moments = build.DTYPES[config.actor.optimizer.moments].itemsize
        rank_memory = state_of(actor, moments)
        now = memory.now - state_of(actor).optimizer_bytes + rank_memory.optimizer_bytes
        rank_memory = replace(rank_memory, load_bytes=max(loaded - now, memory.peak - memory.now))
        if config.actor.fp8 is not None:
            rank_memory = _with_fp8_weights(rank_memory, actor, config.actor.fp8)
        if fused:
            actor.config.fp8 = config.actor.fp8  # for rows that pad a micro-batch
            stack.enter_context(_fused(actor, config.actor))
            if actor.description.vision is not None and actor.grid.pp_rank == 0:
                whole_windows(actor.chunks[0], config, actor.model)
        for chunk in actor.chunks:
            for _, router in routers(chunk):
                router.register_forward_hook(_evenly)
        tokens = config.actor.tokens_per_microbatch
        longest = config.rollout.max_prompt_tokens + config.rollout.max_tokens
        checked = min(tokens, longest * math.ceil(config.rollout.sync_check_rollouts / actor.grid.dp))
        with torch.no_grad():
            forward, check = (
                max(_run_chunk(actor, chunk, micro, memory).peak for chunk in actor.chunks)
                for micro in (largest_micro_batch(config, actor, count) for count in (tokens, checked))
            )
        update = [
            _run_chunk(actor, chunk, largest_micro_batch(config, actor, tokens), memory) for chunk in actor.ddp_chunks
        ]
        rank_memory = replace(rank_memory, forward_bytes=forward, check_bytes=check)
        return rank_memory, update, _optimizer_bytes(actor, rank_memory.optimizer_bytes, moments)


@contextmanager
def built_rank(
    config: Config, hf_config: HFConfig, rank: int, world: int, where: torch.device = META
) -> Iterator[tuple[Actor, StorageCounter, int]]:
    """The actor of one rank, with its optimizer, the count of what it holds, and the most that it held without its optimizer;
    undone at the end.

    Raises:
        ValueError: Megatron-Core refuses the layout; with its reason.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        (Path(folder) / "config.json").write_text(json.dumps(dict(hf_config)))
        stack.enter_context(_variables({"RANK": str(rank), "WORLD_SIZE": str(world)}))
        stack.enter_context(fake_world(rank, world))
        if where == META:
            stack.enter_context(device.without_content())
        stack.callback(parallel_state.destroy_model_parallel)
        memory = stack.enter_context(StorageCounter(where))
        dtype = build.DTYPES[config.model.dtype]
        with errors_named(f"rank {rank} of {world} cannot be built", AssertionError, RuntimeError, ValueError):
            grid = distributed.initialize(config.actor.parallel, timeout_minutes=1.0)
            with where:
                actor = Actor(config, grid, folder, Zeros(model_of(hf_config), dtype, where))
            loaded = memory.peak
            actor.start_optimizer(config.actor.optimizer, total_steps=1)
        yield actor, memory, loaded


def state_of(actor: Actor, moments: int = 4) -> RankMemory:
    """Memory of a rank between steps, with so many bytes for each number of Adam's moments."""
    parameters = [parameter for chunk in actor.chunks for parameter in chunk.parameters()]
    biases = [buffer for chunk in actor.chunks for name, buffer in chunk.named_buffers() if is_bias(name)]
    buffers = [buffer for chunk in actor.ddp_chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    weights = {storage_key(parameter): parameter.untyped_storage() for parameter in parameters}
    state = {
        storage_key(tensor): tensor for tensor in tensors_of(actor.optimizer) if storage_key(tensor) not in weights
    }
    adams = [own for part in optimizer_parts(actor.optimizer) for own in part.optimizer.state.values()]
    of_moments = {storage_key(own[name]) for own in adams for name in PER_ELEMENT[1:]}
    sizes = {key: state[key].nbytes * moments // 4 if key in of_moments else state[key].nbytes for key in state}
    on_host = actor.optimizer_config.device == "cpu"
    away = [sizes[key] for key, tensor in state.items() if tensor.device == parameters[0].device]
    return RankMemory(
        rank=actor.grid.rank,
        ranks=1,
        stage=actor.grid.pp_rank,
        parameters=sum(weight.numel() for weight in (*parameters, *biases)),
        parameter_bytes=sum(weight.nbytes for weight in (*parameters, *biases)),
        gradient_bytes=sum(buffer.grad_data.nbytes for buffer in buffers),
        optimizer_bytes=0 if on_host else sum(sizes.values()),
        optimizer_away_bytes=sum(sizes.values()) if on_host else pinned_bytes(away),
        weights_away_bytes=pinned_bytes([storage.nbytes() for storage in weights.values()]),
    )


def _with_fp8_weights(rank_memory: RankMemory, actor: Actor, fp8: FP8Config) -> RankMemory:
    """Counts matrices in FP8 beside those of the model's dtype, or in their place."""
    weights = quantised_weights(quantised_layers(actor.chunks, fp8.bf16_ends))
    size = sum(weight_bytes(weight.shape[0], weight.shape[1], fp8.recipe) for weight in weights)
    if not fp8.param_gather:
        return replace(rank_memory, fp8_bytes=size)
    return replace(
        rank_memory, parameter_bytes=rank_memory.parameter_bytes + size - sum(weight.nbytes for weight in weights)
    )


def _sync_bytes(config: Config, model: Model, world: int, node: int) -> np.ndarray | None:
    """Bytes that each rank sends and receives in two buckets that follow one another, at the most; [world]."""
    if config.rollout.sync != "sliced" or unplaced(model):
        return None
    width = build.DTYPES[config.model.dtype].itemsize
    actor = ActorLayout.of(config.actor.parallel, model.dims["layers"], world)
    engine = EngineLayout.of(config.rollout, config.launch.generators or 0)
    plan = reshard.make_plan(model, actor, engine, bucket_elements=BUCKET_BYTES // width, node=node)
    buckets = np.array([width * (traffic.sent + traffic.received) for traffic in plan.traffic()])
    return np.max(buckets[:-1] + buckets[1:] if len(buckets) > 1 else buckets, axis=0)


def _optimizer_bytes(actor: Actor, of_first: int, moments: int = 4) -> list[tuple[int, int]]:
    """Returns for each rank of a pipeline stage, whose first holds `of_first`, bytes of moments and master weights, and of
    all.

    Shards are equal parts of the gradients' buffers, some of which only pad them. Beside them torch's Adam keeps a float32
    number of steps for each parameter.
    """
    parallel, stage = actor.config.parallel, actor.grid.world // actor.grid.pp
    if not actor.config.optimizer.distributed or actor.config.optimizer.device == "cpu":
        return [(of_first, of_first)] * stage
    elements, parameters = np.zeros((2, stage), dtype=np.int64)
    for name, ranks in (
        ("buffers", parallel.tensor),
        ("expert_parallel_buffers", parallel.expert * parallel.expert_tensor),
    ):
        shards = stage // ranks
        for buffer in (buffer for chunk in actor.ddp_chunks for buffer in getattr(chunk, name)):
            for bucket in buffer.buckets:
                size = bucket.grad_data.numel() // shards
                first = bucket.offset + np.arange(stage) // ranks * size
                for start, stop, _ in buffer.param_index_map.values():
                    shared = np.maximum(np.minimum(stop, first + size) - np.maximum(start, first), 0)
                    elements, parameters = elements + shared, parameters + (shared > 0)
    state = (2 * moments + (4 if actor.dtype != torch.float32 else 0)) * elements
    every = state + 4 * parameters
    return list(zip(state.tolist(), (of_first + every - every[0]).tolist(), strict=True))


def _run_chunk(actor: Actor, chunk: Chunk, micro: MicroBatch, memory: StorageCounter) -> _Chunk:
    """One micro-batch through a chunk, and back where gradients are on, between neighbours that hold the hidden states."""
    module = unwrap(chunk)
    before = memory.restart()
    with device.megatron():
        if not module.pre_process:
            module.set_input_tensor(_hidden_states(actor, micro))
        output: Tensor = actor.forward(chunk, micro, updates=torch.is_grad_enabled())
        if module.post_process:
            output = actor.score(micro, output, temperature=1.0, with_entropy=False)[0]
        kept = memory.now - before
        if torch.is_grad_enabled():
            torch.autograd.backward(output, torch.empty_like(output))
        del output
        module.set_input_tensor(None)
    return _Chunk(kept, memory.peak - before)


def _hidden_states(actor: Actor, micro: MicroBatch) -> Tensor:
    """Input of a stage: [tokens (/ TP with sequence parallelism), 1, hidden]."""
    split = actor.grid.tp if actor.config.parallel.sequence else 1
    shape = (len(micro.tokens) // split, 1, actor.description.dims["hidden"])
    where = next(actor.chunks[0].parameters()).device
    return torch.zeros(shape, dtype=actor.dtype, device=where, requires_grad=torch.is_grad_enabled())


def _evenly(router: nn.Module, inputs: object, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Probabilities as they are, and tokens to experts in turn: [tokens, experts], real."""
    probabilities, chosen = output
    tokens, experts = chosen.shape
    top_k = cast(int, router.topk)
    turns = torch.arange(tokens * top_k).view(tokens, top_k) % experts
    return probabilities, torch.zeros(tokens, experts, dtype=torch.bool).scatter(1, turns, True)


def _fused(actor: Actor, config: ActorConfig) -> AbstractContextManager[None]:
    """The actor's layers keep for the backward pass what Transformer Engine's kernels keep. `config`: with what needs
    them."""
    again = config.recompute == "selective" and "moe_act" in config.recompute_modules
    in_fp8 = (None, 0) if config.fp8 is None else (config.fp8.recipe, config.fp8.bf16_ends)
    return fused_kernels(actor.chunks, PackedAttention, SequenceParallelRMSNorm, again, *in_fp8)


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
