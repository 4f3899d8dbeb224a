"""The GPU memory that a recipe takes, from the model's config.json and the recipe's layout. No torch, no GPU.

Weights, gradients and optimizer state are counted exactly, parameter by parameter as Megatron-Core cuts them (tests compare
with models that were really built). Activations, the output layer's workspace and what the engine needs besides weights and
cache are estimates; each says below what it is made of, and docs/gpu.md what one card took.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from megatron_rl.base.block_fp8 import BLOCK
from megatron_rl.config.actor import ActorConfig, ParallelConfig
from megatron_rl.config.pipeline_split import stage_numbers
from megatron_rl.config.schema import Config, RolloutConfig
from megatron_rl.models import Model
from megatron_rl.models.fp8_weights import module_of, quantised_modules
from megatron_rl.models.lora import adapters_of
from megatron_rl.models.rules import Dims, Place, Rule, shard_shape
from megatron_rl.planning.activations import (
    activations,
    check_workspace,
    forward_workspace,
    fp8_weights,
    head_workspace,
)
from megatron_rl.planning.components import (
    CHECK,
    CHECKPOINT,
    GENERATE,
    GIB,
    HOST_PHASES,
    LOAD,
    OLD,
    PHASES,
    SYNC,
    UPDATE,
    Component,
    MemoryPlan,
    Parameters,
    Part,
)
from megatron_rl.weights.sync_plan import BUCKET_BYTES

# CUDA context, NCCL's buffers, cuBLAS workspaces, the allocator's fragmentation, CUDA graphs kept through vLLM's sleep.
RESERVE_GIB = 5.0
# vLLM's activations while it reads a prompt of max_num_batched_tokens, its sampler and CUDA graphs, within its own share.
ENGINE_WORKSPACE_GIB = 3.0


# --------------------------------------------------------------------------------------------------------- parameters
def _on_rank(rule: Rule, dims: Dims, tensor: int, copies: int) -> Parameters:
    """`copies` of a rule's parameter, each as one of `tensor` ranks holds it."""
    count = copies * math.prod(shard_shape(rule, dims, tensor))
    if rule.per_expert:
        return Parameters(expert=count)
    return Parameters(linear=count) if rule.is_projection else Parameters(other=count)


def actor_parameters(
    model: Model,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    virtual_pipeline: int = 1,
    expert: int = 1,
    expert_tensor: int = 1,
    stage: int = 0,
) -> Parameters:
    """Parameters on each rank of a pipeline stage.

    A tied output layer is a second copy on the last stage where there are several.
    """
    copies = {
        Place.EMBEDDING: int(stage == 0),
        Place.HEAD: int(stage == pipeline - 1),
    }
    layers = stage_numbers(model.dims["layers"], pipeline, virtual_pipeline)[stage]
    result = Parameters()
    for rule in model.family.rules if pipeline > 1 else model.parameters:
        experts = model.expert_count // expert if rule.per_expert else 1
        ranks = expert_tensor if rule.per_expert else tensor
        count = sum(map(rule.is_in, layers)) if rule.per_layer else copies[rule.place]
        result += _on_rank(rule, model.dims, ranks, count * experts)
    return result


def total_parameters(model: Model) -> int:
    """Parameters of the whole model, a tied output layer counted once."""
    return actor_parameters(model).total


def active_parameters(model: Model) -> int:
    """Parameters of the whole model that one token passes through."""
    whole = actor_parameters(model)
    return whole.dense + (whole.expert // model.experts.count * model.experts.top_k if model.experts else 0)


@lru_cache
def engine_parameters(model: Model, tensor: int, expert: int = 1) -> int:
    """Parameters on each of an engine's `tensor` ranks: key/value heads repeated where ranks outnumber them, experts whole
    and spread over `expert` ranks (all or 1), else cut."""
    return actor_parameters(model.in_engine(tensor), tensor=tensor, expert=expert, expert_tensor=tensor // expert).total


def engine_weight_bytes(model: Model, rollout: RolloutConfig, width: int) -> float:
    """Weights on each of an engine's ranks, `width` bytes a parameter; in FP8 one, and a scale per block."""
    tensor = rollout.tensor_parallel
    expert = tensor if rollout.expert_parallel else 1
    total = float(engine_parameters(model, tensor, expert) * width)
    if rollout.fp8 == "none":
        return total
    modules, dims = quantised_modules(model, rollout.fp8_skip), model.in_engine(tensor).dims
    for rule in (rule for rule in model.parameters if rule.is_projection):
        layers = sum(module_of(rule.at(i, 0).hf[0].name) in modules for i in rule.layers_of(dims["layers"]))
        copies = layers * model.expert_count // expert if rule.per_expert else layers
        count = _on_rank(rule, dims, tensor // expert if rule.per_expert else tensor, copies).total
        total -= count * (width - 1 - 4 / BLOCK**2)
    return total


def cache_bytes_per_token(model: Model, tensor: int, dtype_bytes: int = 2) -> int:
    """KV cache on each rank of an engine."""
    return model.dims["layers"] * model.attention.cache_numbers(tensor) * dtype_bytes


def state_tokens(model: Model, tensor: int, dtype_bytes: int = 2) -> float:
    """Returns a sequence's room in an engine's cache beside its keys and values, in tokens that take as much."""
    attention = model.attention
    layer = attention.state_bytes(tensor, dtype_bytes) + attention.unfilled_bytes(tensor, dtype_bytes)
    return model.dims["layers"] * layer / cache_bytes_per_token(model, tensor, dtype_bytes)


# --------------------------------------------------------------------------------------------------------------- sync
def _sync_buckets(model: Model, rollout: RolloutConfig, dtype_bytes: int) -> float:
    """Slices: two buckets, of each what is sent and what is received. Whole tensors: what is gathered."""
    if rollout.sync == "sliced":
        return 4 * BUCKET_BYTES
    largest = model.dims["vocab"] * model.dims["hidden"] * dtype_bytes
    return max(3 * max(BUCKET_BYTES, largest), _sync_layers(model, rollout, 1, dtype_bytes) + 2 * BUCKET_BYTES)


def _sync_layers(model: Model, rollout: RolloutConfig, stages: int, dtype_bytes: int) -> float:
    """Counts for an FP8 engine a layer's experts (dense: gate and up) of every pipeline stage, collected in the model's
    dtype and made anew. Whole tensors: vLLM keeps a layer's until the last of them has come, then makes its shard of them
    anew."""
    dims, tensor = model.dims, rollout.tensor_parallel
    matrices = model.experts.numbers(dims["hidden"]) if model.experts else 2 * dims["ffn"] * dims["hidden"]
    layer = matrices * dtype_bytes
    if rollout.sync != "sliced":
        return layer + layer / tensor
    return stages * layer / tensor * (1 + 1 / dtype_bytes) if rollout.fp8 != "none" else 0


# --------------------------------------------------------------------------------------------------------------- plan
def make_plan(
    config: Config, model: Model, world: int, gpu_bytes: float, host_bytes: float | None = None
) -> MemoryPlan:
    """The plan of a checked recipe on `world` GPUs of `gpu_bytes` each, and as many times `host_bytes` of host memory."""
    parallel, gpus = config.actor.parallel, world
    generators = config.launch.generators or 0
    world = gpus - generators  # of the actor
    width = 4 if config.model.dtype == "float32" else 2
    stage, fullest = _fullest_stage(model, parallel)
    trained = trained_parameters(model, config.actor)
    replicas = world // (parallel.tensor * parallel.pipeline)
    weights = float((fullest.total + (trained.total if config.actor.lora is not None else 0)) * width)
    weights += (4 - width) * (
        fullest.total - fullest_rank(_without_buffers(model), parallel).total
    )  # which are float32
    in_fp8, fp8_bytes = fp8_weights(model, config.actor, stage)
    if config.actor.fp8 is not None and config.actor.fp8.param_gather:
        weights, fp8_bytes = weights + fp8_bytes - width * in_fp8, 0
    state = _optimizer_bytes(config, trained, world, width)
    on_cpu = config.actor.optimizer.device == "cpu"
    optimizer, on_host = 0.0 if on_cpu else state, state * (on_cpu or config.actor.offload)
    engine_weights = engine_weight_bytes(model, config.rollout, width)
    cache = config.rollout.memory_fraction * gpu_bytes - engine_weights - ENGINE_WORKSPACE_GIB * GIB
    cache_tokens = cache / cache_bytes_per_token(model, config.rollout.tensor_parallel, width)
    of_actor = [
        *_actor_state(config, model, trained, weights, fp8_bytes, optimizer, width),
        *_actor_passes(config, model, replicas // parallel.context, width),
    ]
    of_engine = list(_engine(config, model, engine_weights, cache, width))
    if generators:  # a rank has one of the two; during a sync the engine keeps its cache
        sync = [part for part in of_engine if part.phases == (SYNC,)]
        of_engine = [replace(part, phases=(GENERATE,)) for part in of_engine]
        of_actor = [replace(part, phases=tuple({*part.phases} - {GENERATE})) for part in of_actor] + sync
    components = [
        *of_actor,
        *of_engine,
        Component(Part.RESERVE, RESERVE_GIB * GIB, PHASES, (), estimate=True),
        *_host(config, model, weights, float(trained.total * width), on_host, cache_tokens),
        Component(
            Part.HOST_CHECKPOINT,
            checkpoint_bytes(config, trained, world, width),
            (CHECKPOINT,),
            ("checkpoint.every=0",) if config.checkpoint.every else (),
            estimate=True,
        ),
    ]
    return MemoryPlan(
        model=model,
        world=gpus,
        generators=generators,
        gpu_bytes=gpu_bytes,
        components=tuple(component for component in components if component.bytes),
        parameters=fullest,
        data_parallel=replicas // parallel.context,
        engines=(generators or gpus) // config.rollout.tensor_parallel,
        cache_tokens=cache_tokens,
        state_tokens=state_tokens(model, config.rollout.tensor_parallel, width),
        longest=config.rollout.max_prompt_tokens + config.rollout.max_tokens,
        host_bytes=host_bytes,
    )


def _split(model: Model) -> tuple[str, ...]:
    return (
        "actor.parallel.tensor",
        "actor.parallel.pipeline",
        *["actor.parallel.expert"] * bool(model.experts),
    )


def _actor_state(
    config: Config,
    model: Model,
    trained: Parameters,
    weights: float,
    fp8_bytes: float,
    optimizer: float,
    width: int,
) -> Iterator[Component]:
    """Weights, gradients, optimizer, and what stands beside them for a while."""
    actor, split = config.actor, _split(model)
    state_in = (LOAD, OLD, UPDATE, CHECK) if actor.offload else PHASES
    weights_in = (LOAD, OLD, UPDATE, SYNC, CHECK) if actor.offload_weights else PHASES
    offload = () if actor.offload else ("actor.offload=true",)
    yield Component(
        Part.WEIGHTS, weights, weights_in, (*["actor.offload_weights=true"] * (not actor.offload_weights), *split)
    )
    # Without `param_gather` they come on top of the bf16 weights, from the first forward pass on, and are not offloaded.
    param_gather = () if actor.fp8 is None or actor.fp8.recipe == "mxfp8" else ("actor.fp8.param_gather=true",)
    yield Component(Part.FP8_COPIES, fp8_bytes, tuple(phase for phase in PHASES if phase != LOAD), param_gather)
    if _keeps_reference(config):  # while it is scored, the actor's own weights are set aside on the device
        yield Component(Part.SET_ASIDE, trained.total * width, (OLD,), split)
    yield Component(Part.GRADIENTS, 4 * trained.total, state_in, (*offload, *split))
    cpu = "actor.optimizer.device=cpu"
    yield Component(Part.OPTIMIZER, optimizer, state_in, (*offload, *[cpu] * actor.optimizer.distributed, "more nodes"))
    if actor.optimizer.distributed:  # its buffer of weights and the weights themselves, before there is an optimizer
        yield Component(Part.LOADING, max(0.0, trained.total * width - optimizer), (LOAD,), split, estimate=True)


def _actor_passes(config: Config, model: Model, data_parallel: int, width: int) -> Iterator[Component]:
    tokens = ("actor.tokens_per_microbatch", *["model.max_pixels"] * (model.description.vision is not None))
    again = ("actor.recompute=full",) if config.actor.recompute != "full" else ()
    yield Component(Part.ACTIVATIONS, activations(model, config, width), (UPDATE,), (*again, *tokens), estimate=True)
    yield Component(Part.HEAD, head_workspace(model, config), (UPDATE,), ("actor.logits_mib",), estimate=True)
    yield Component(
        Part.FORWARD, forward_workspace(model, config, width), (OLD,), (*tokens, "actor.logits_mib"), estimate=True
    )
    checked = check_workspace(model, config, data_parallel, width)
    yield Component(Part.SYNC_CHECK, checked, (CHECK,), (*tokens, "rollout.sync_check_rollouts"), estimate=True)


def _engine(config: Config, model: Model, weights: float, cache: float, width: int) -> Iterator[Component]:
    rollout = config.rollout
    knobs = ("rollout.tensor_parallel", *["rollout.fp8=blockwise"] * (rollout.fp8 == "none"))
    yield Component(Part.ENGINE_WEIGHTS, weights, (GENERATE, SYNC), knobs)
    yield Component(Part.ENGINE_WORKSPACE, ENGINE_WORKSPACE_GIB * GIB, (GENERATE,), (), estimate=True)
    yield Component(Part.CACHE, max(0.0, cache), (GENERATE,), ("rollout.memory_fraction",))
    yield Component(Part.BUCKETS, _sync_buckets(model, rollout, width), (SYNC,), ())
    if rollout.sync == "sliced":
        layers = _sync_layers(model, rollout, config.actor.parallel.pipeline, width)
        yield Component(Part.SYNC_LAYERS, layers, (SYNC,), ())


def _keeps_reference(config: Config) -> bool:
    kl = config.algorithm.kl
    return config.actor.lora is None and (kl.coef > 0 or kl.reward_coef > 0)


def _host(
    config: Config, model: Model, weights: float, trained: float, optimizer: float, cache_tokens: float
) -> Iterator[Component]:
    """Components that stay in the host's memory from their first use on."""
    actor = config.actor
    on_gpu = ("actor.offload=false",) if actor.optimizer.device == "gpu" else ("actor.optimizer.device=gpu",)
    yield Component(Part.HOST_OPTIMIZER, optimizer, HOST_PHASES, (*on_gpu, "more nodes"))
    yield Component(Part.HOST_WEIGHTS, weights * actor.offload_weights, HOST_PHASES, ("actor.offload_weights=false",))
    yield Component(Part.HOST_REFERENCE, trained * _keeps_reference(config), HOST_PHASES, _split(model))
    # vLLM keeps the experts of the tokens in its cache, a byte each.
    replay = actor.moe.routing_replay == "rollout"
    chosen = max(0.0, cache_tokens) * model.dims["layers"] * model.experts.top_k if replay and model.experts else 0
    yield Component(Part.HOST_EXPERTS, chosen, HOST_PHASES, ("rollout.memory_fraction",))


def checkpoint_bytes(config: Config, trained: Parameters, world: int, width: int) -> float:
    """Bytes of a checkpoint, in the mean of the ranks that share them: weights, and in fp32 master weights and two
    moments."""
    return (width + 12) * _shared_out(trained, config.actor.parallel, world) if config.checkpoint.every else 0


def _shared_out(parameters: Parameters, parallel: ParallelConfig, world: int) -> float:
    """A rank's part where those that hold the same parameters share them out."""
    stage = world // parallel.pipeline  # ranks
    dense, experts = stage // parallel.tensor, stage // (parallel.expert * parallel.expert_tensor)
    return parameters.dense / dense + parameters.expert / experts


def fullest_rank(model: Model, parallel: ParallelConfig) -> Parameters:
    """Parameters of the pipeline stage that holds most; the inner stages are alike."""
    return _fullest_stage(model, parallel)[1]


def _fullest_stage(model: Model, parallel: ParallelConfig) -> tuple[int, Parameters]:
    dense = (parallel.tensor, parallel.pipeline, parallel.virtual_pipeline)
    return _fullest_of_cut(model, *dense, parallel.expert, parallel.expert_tensor)


@lru_cache(maxsize=1024)  # a search asks for the same cut with each choice of everything else
def _fullest_of_cut(
    model: Model, tensor: int, pipeline: int, virtual_pipeline: int, expert: int, expert_tensor: int
) -> tuple[int, Parameters]:
    sizes = {"tensor": tensor, "pipeline": pipeline, "virtual_pipeline": virtual_pipeline}
    experts = {"expert": expert, "expert_tensor": expert_tensor}
    some = {0, min(1, pipeline - 1), pipeline - 1}
    stages = [(stage, actor_parameters(model, **sizes, **experts, stage=stage)) for stage in sorted(some)]
    return max(stages, key=lambda one: one[1].total)


@lru_cache
def _without_buffers(model: Model, frozen_tower: bool = False) -> Model:
    """The model's parameters alone; without those of its tower where that is frozen."""
    rules = tuple(rule for rule in model.family.rules if not (rule.buffer or (frozen_tower and rule.in_tower)))
    return replace(model, family=replace(model.family, rules=rules))


def trained_parameters(model: Model, actor: ActorConfig) -> Parameters:
    """Parameters that are trained, on the rank that holds most: with LoRA the adapters; no frozen tower, no buffers."""
    if actor.lora is not None:
        return fullest_rank(adapters_of(model, actor.lora), actor.parallel)
    return fullest_rank(_without_buffers(model, actor.freeze_vision_tower), actor.parallel)


def _optimizer_bytes(config: Config, parameters: Parameters, world: int, width: int) -> float:
    """Adam's two moments, and an fp32 master copy where parameters are bf16, or it is on the CPU; sharded over the ranks that
    share them."""
    optimizer = config.actor.optimizer
    each = 12 if optimizer.device == "cpu" or (width == 2 and optimizer.moments == "float32") else 8
    if not optimizer.distributed:
        return each * parameters.total
    return each * _shared_out(parameters, config.actor.parallel, world)
