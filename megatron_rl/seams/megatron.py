"""Megatron-Core: its private parts and the patches of it. Written for 0.19.2. The adapter to a CPU is `megatron_cpu`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import layers, random
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn

from megatron_rl.seams import check_parameters, replaced

if TYPE_CHECKING:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

State = dict[Any, Any]  # (part of) a sharded state dictionary: dictionaries and lists of it, tensors, numbers

MAIN_GRADIENT = "main_grad"  # attribute of a parameter: its view of the gradient buffer
# The parameters of functions that are called or replaced here.
OUTPUT_LAYER = "input_ weight runtime_gather_output"
FINALIZE = "model num_tokens pg_collection force_all_reduce"
INITIALIZE, REMAINDERS = "initialize_state", "store_param_remainders"  # of Transformer Engine's `FusedAdam`
# Of `DistributedOptimizer`, with their names.
GET_STATES = ("_get_main_param_and_optimizer_states", "self model_param")
SET_STATES = ("_set_main_param_and_optimizer_states", "self model_param tensors")
GATHERED_STATE = ("get_parameter_state_dp_zero", "self use_gloo_comm empty_data return_on_all_ranks")


class OutputLayer(nn.Module):
    weight: nn.Parameter


class Layer(nn.Module):
    layer_number: int  # in the whole model, from 1


class Decoder(nn.Module):
    layers: Sequence[Layer]


class Chunk(nn.Module):
    """The part in use of a `GPTModel`, and of the `DistributedDataParallel` around it; for type checking only."""

    config: TransformerConfig
    pre_process: bool
    post_process: bool
    share_embeddings_and_output_weights: bool
    embedding: nn.Module
    decoder: Decoder
    output_layer: OutputLayer
    set_input_tensor: Callable[[Tensor | None], None]
    sharded_state_dict: Callable[..., State]
    shared_embedding_or_output_weight: Callable[[], Tensor]
    no_sync: Callable[[], contextlib.AbstractContextManager[None]]
    start_param_sync: Callable[..., None]
    zero_grad_buffer: Callable[[], None]
    offload_grad_buffers: Callable[[], None]
    restore_grad_buffers: Callable[[], None]
    buffers: Sequence[Buffer]  # type: ignore[assignment]
    expert_parallel_buffers: Sequence[Buffer]


class GradientBucket(Protocol):
    offset: int
    numel_unpadded: int
    grad_data: Tensor


class Buffer(Protocol):
    """A flat buffer of gradients (and parameters), in buckets that are padded."""

    numel: int
    buckets: Sequence[GradientBucket]
    grad_data: Tensor
    param_index_map: Mapping[nn.Parameter, tuple[int, int, int]]  # where each begins and ends in it; and its bucket


class LocalRange(Protocol):
    start: int
    end: int


class Ranges(TypedDict):
    gbuf_local: LocalRange  # of a parameter, within this rank's shard of its bucket


class BucketRanges(TypedDict):
    param_map: dict[nn.Parameter, Ranges]


class OptimizerPart(Protocol):
    """One of Megatron's optimizers; the last four of the distributed one only."""

    config: OptimizerConfig
    get_parameters: Callable[[], list[Tensor]]
    optimizer: torch.optim.Optimizer
    buffers: Sequence[Buffer]
    gbuf_ranges: Sequence[dict[tuple[torch.dtype, torch.dtype], list[BucketRanges]]]
    data_parallel_group: torch.distributed.ProcessGroup
    model_param_group_index_map: dict[nn.Parameter, tuple[int, int]]


class Optimizer(Protocol):
    """The part in use of `MegatronOptimizer`, which may be a chain of several."""

    param_groups: list[dict[str, object]]
    zero_grad: Callable[[], None]
    prepare_grads: Callable[[], bool]
    get_grad_norm: Callable[[], float | Tensor]  # a tensor on a GPU
    step_with_ready_grads: Callable[[], bool]
    sharded_state_dict: Callable[..., State]
    load_state_dict: Callable[[State], None]


# --------------------------------------------------------------------------------------------------------------- model
def return_hidden_states(chunk: Chunk) -> None:
    """Makes a GPTModel return hidden states instead of logits; `actor.head` applies the output layer in chunks.

    GPTModel has no such option: its output layer would make logits of all tokens at once.
    """

    def pass_through(
        input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        return input_, None

    check_parameters(chunk.output_layer.forward, OUTPUT_LAYER)
    chunk.output_layer.forward = pass_through


def allow_fused_accumulation() -> None:
    """Lets Transformer Engine's layers add to the fp32 gradients without APEX, which Megatron's own layers would need for it.

    The only such layer is the output layer, whose forward pass is replaced (`return_hidden_states`).
    """
    layers._grad_accum_fusion_available = True


def copy_recomputed_outputs() -> None:
    """Copies what was computed again into the storage of the output that was let go, as Megatron-Core did before 0.19.

    Since then it shares the storages by an extension that it compiles at the first use: on every node, by a compiler that
    may be missing there, and waiting without end for the lock that a killed compilation has left.
    """
    random._get_share_storage = lambda: _copy_storage


def _copy_storage(output: Tensor, computed_again: Tensor) -> None:
    storage = computed_again.untyped_storage()
    output.untyped_storage().resize_(storage.nbytes())
    with torch.no_grad():
        output.untyped_storage().copy_(storage)


def routers(chunk: Chunk) -> Iterator[tuple[int, nn.Module]]:
    """(number of the layer in the whole model, from 1; its router) of every mixture of experts in a chunk."""
    for layer in chunk.decoder.layers:
        for module in layer.modules():
            if isinstance(module, MoELayer):
                yield layer.layer_number, module.router


def sum_gradients_undivided(config: TransformerConfig) -> None:
    """Makes Megatron's schedule add up gradients without a division by the number of tokens: losses are divided already."""
    check_parameters(finalize_model_grads, FINALIZE)

    def sum_gradients(model: list[nn.Module], num_tokens: Tensor | None, *args: object, **kwargs: object) -> None:
        finalize_model_grads(model, None, *args, **kwargs)

    config.finalize_model_grads_func = sum_gradients


@contextlib.contextmanager
def before_gradients_are_summed(config: TransformerConfig, call: Callable[[], None]) -> Iterator[None]:
    """While entered, `call` is called after the last micro-batch's backward pass, before gradients go over ranks."""
    finalize = config.finalize_model_grads_func

    def call_and_finalize(*args: object, **kwargs: object) -> None:
        call()
        finalize(*args, **kwargs)

    config.finalize_model_grads_func = call_and_finalize
    try:
        yield
    finally:
        config.finalize_model_grads_func = finalize


# ----------------------------------------------------------------------------------------------------------- optimizer
def optimizer_parts(optimizer: Optimizer) -> list[OptimizerPart]:
    """Megatron's optimizers of dense and of expert parameters, or the only one."""
    parts: list[OptimizerPart] = getattr(optimizer, "chained_optimizers", [optimizer])
    return parts


def tensors_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Moments, and what the optimizer steps: master weights, or the model's own weights where it has none."""
    for part in optimizer_parts(optimizer):
        inner = part.optimizer
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
        for group in inner.param_groups:
            yield from group["params"]


def initialize_adam(optimizer: Optimizer) -> None:
    """Gives Adam its zero state now instead of at the first step: checkpoints read and restore it before any was taken.

    Megatron's own initialisation leaves out the `step` entry that its checkpoint code expects of torch's Adam, and calls that
    of Transformer Engine's fused Adam, where moments are kept in other types, without an argument that it has since 2.0.
    """
    for part in optimizer_parts(optimizer):
        inner = part.optimizer
        by_itself = getattr(inner, INITIALIZE, None)
        if by_itself is None and not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            continue  # without parameters
        for parameter in (parameter for group in inner.param_groups for parameter in group["params"]):
            if by_itself is not None:
                remainders = getattr(inner, REMAINDERS) and parameter.dtype == torch.bfloat16
                by_itself(parameter, store_param_remainders=remainders)
            else:
                zeros = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
                inner.state[parameter] = {"step": torch.zeros(()), **zeros}


def clip_gradients(optimizer: Optimizer, norm: float) -> None:
    """Scales the prepared gradients down to `clip_grad`, as `ChainedOptimizer.step` does between norm and step."""
    for part in optimizer_parts(optimizer):
        config, parameters = part.config, part.get_parameters()
        if parameters and config.clip_grad > 0:
            decoupled = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(parameters, config.clip_grad, norm, use_decoupled_grad=decoupled)


def states_of(part: OptimizerPart, parameter: nn.Parameter) -> dict[str, Tensor]:
    """This rank's part of a parameter's fp32 value (`param`) and moments, in the distributed optimizer."""
    get: Callable[[nn.Parameter], dict[str, Tensor]] = getattr(part, GET_STATES[0])
    return get(parameter)


def counts_by_parameter(optimizer: Optimizer) -> bool:
    """Tells whether the number of steps lies with each parameter, as of torch's Adam, or with each group of them, as of the
    fused Adam of Transformer Engine, which refuses a state that it has no dtype for."""
    return not any(hasattr(part.optimizer, "name_to_dtype_map") for part in optimizer_parts(optimizer))


@contextlib.contextmanager
def keeping_adam_steps(optimizer: Optimizer) -> Iterator[None]:
    """Around `load_state_dict`: lets the distributed optimizer load the state of torch's Adam.

    The number of steps comes with the parameter groups. Reading the tensors of a parameter, Megatron leaves `step` out, as
    for the fused Adam of Transformer Engine, and then asks for it. And it gives all parameters one tensor for it: torch's
    Adam, which adds 1 to it per parameter, would count hundreds of steps at each.
    """
    name, parameters = SET_STATES
    original = getattr(DistributedOptimizer, name)

    def with_step(self: OptimizerPart, model_param: nn.Parameter, tensors: dict[str, Tensor]) -> None:
        group, place = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        kept = {"step": state["step"]} if "step" in state else {}
        original(self, model_param, kept | tensors)

    with replaced(DistributedOptimizer, name, with_step, parameters):
        yield
    for part in optimizer_parts(optimizer):
        for state in part.optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].clone()


# --------------------------------------------------------------------------------------------------------- checkpoints
@contextlib.contextmanager
def counting_steps(optimizer: Optimizer) -> Iterator[None]:
    """Around `sharded_state_dict`: gives each part the number of steps where this rank has none of its parameters, as a
    pipeline stage without experts. The distributed optimizer reads it from torch's Adam's state, and finds none."""
    adams = [part.optimizer for part in optimizer_parts(optimizer) if isinstance(part, DistributedOptimizer)]
    adams = [adam for adam in adams if isinstance(adam, torch.optim.Adam | torch.optim.AdamW)]
    steps = [state["step"] for adam in adams for state in adam.state.values()][:1] or [torch.zeros(())]
    empty = [adam for adam in adams if not adam.state]
    for adam in empty:
        adam.state[_NOBODYS] = {"step": steps[0]}
    try:
        yield
    finally:
        for adam in empty:
            del adam.state[_NOBODYS]


_NOBODYS = "no parameter"  # a key of Adam's state


PER_ELEMENT = ("param", "exp_avg", "exp_avg_sq")


@contextlib.contextmanager
def standing_in(make: Callable[[OptimizerPart, int, str], Tensor]) -> Iterator[None]:
    """While entered, the distributed optimizers give `make(optimizer, buffer's number, key)` for their state: `buffer.numel`
    elements, in fp32.

    To save it, Megatron would gather all of the state in new host memory, and collect garbage each time, longer than all of
    the planning. To load it, it makes room for a buffer's buckets without the padding between them, looks every parameter up
    by where it lies with the padding, and warns of data corruption at the end, where what it finds is too short.
    """

    def stand_ins(optimizer: OptimizerPart, **_: object) -> State:
        state: State = {"buckets_coalesced": True}
        for number, ranges in enumerate(optimizer.gbuf_ranges):
            [dtype] = ranges
            state[number] = {dtype: {key: make(optimizer, number, key) for key in PER_ELEMENT}}
        return state

    collector = distrib_optimizer.gc
    distrib_optimizer.gc = SimpleNamespace(collect=lambda: 0)
    try:
        with replaced(distrib_optimizer.DistributedOptimizer, GATHERED_STATE[0], stand_ins, GATHERED_STATE[1]):
            yield
    finally:
        distrib_optimizer.gc = collector


def main_gradient(weight: Tensor) -> Tensor | None:
    """Where Megatron-Core's DistributedDataParallel sums the gradients of a parameter; None without it."""
    return getattr(weight, MAIN_GRADIENT, None)


def added_to_main_gradient(weight: Tensor) -> Tensor | None:
    """The result of a backward function that has added the weight's gradient to `main_gradient` itself.

    As Megatron-Core's own layers do: a tensor of arbitrary values, which sets off the hook that tells
    DistributedDataParallel, and is not added. Of a weight that is the embedding too, the embedding's gradient does both.
    """
    if getattr(weight, "zero_out_wgrad", False):
        return None
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.empty_like(weight)
