"""The actor's forward and backward pass under the types of `spmd_types`, which tell what tensor-parallel ranks, or
context-parallel ones, have of a tensor: the same, with the same gradient (I); the same, with shares of a gradient that are
still to be summed (R); parts of it (V); or shares of a sum (P).

What a parameter is, the optimizer step says: its gradient is summed over the ranks (R), is not (I), or the ranks have parts
(V). Whatever mixes them wrongly leaves a gradient that nobody sums, or one that is summed twice, and is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import spmd_types as spmd
import torch
from megatron.core import utils
from megatron.core.tensor_parallel import layers, mappings
from megatron.core.transformer.moe import moe_utils, router
from spmd_types import rules
from spmd_types.checker import typecheck
from torch import Tensor

from megatron_rl.actor import head
from megatron_rl.actor.actor import Actor
from megatron_rl.actor.packing import MicroBatch
from megatron_rl.config.actor import ParallelConfig
from megatron_rl.config.schema import Config
from megatron_rl.modules import deepstack
from megatron_rl.modules.layers import PackedAttention
from megatron_rl.modules.vision import VisionLanguageModel
from megatron_rl.runtime import device, distributed
from tests.actor.layouts import make_batch
from tests.models import seeing

from .faults import FAULTS

_OF_OWN_TOKENS = ("tokens", "positions", "predictors", "own")  # of a micro-batch, with context parallelism


@dataclass(frozen=True)
class Case:
    """A variant of `tests.models.tiny` over two tensor-parallel ranks, or context-parallel ones; `fault`: one of `FAULTS`."""

    variant: str
    sequence: bool
    fault: str = ""
    expert: int = 1
    expert_tensor: int = 1
    context: bool = False

    @property
    def name(self) -> str:
        experts = f", EP {self.expert} ETP {self.expert_tensor}" if self.expert * self.expert_tensor > 1 else ""
        tokens = ", CP" * self.context + ", sequence" * self.sequence
        return f"{self.variant}{tokens}{experts}{f', {self.fault}' if self.fault else ''}"


def run(root: str, cases: Sequence[Case]) -> None:
    """One rank of every case in turn: `<name>.txt` has what is refused, nothing where nothing is."""
    from megatron.core import parallel_state

    declare()
    for case in cases:
        found = _refused(Path(root), case)
        if torch.distributed.get_rank() == 0:
            (Path(root) / f"{case.name}.txt").write_text(found)
        parallel_state.destroy_model_parallel()


def _refused(root: Path, case: Case) -> str:
    config = Config(run_dir=str(root / "run"))
    config.model.dtype = "float32"
    sizes = {"context": 2} if case.context else {"tensor": 2}
    config.actor.parallel = ParallelConfig(
        **sizes, sequence=case.sequence, expert=case.expert, expert_tensor=case.expert_tensor
    )
    config.actor.optimizer.distributed = False  # each rank has whole sums
    config.actor.tokens_per_microbatch = 96
    grid = distributed.initialize(config.actor.parallel, timeout_minutes=2)
    with FAULTS[case.fault]():
        actor = Actor(config, grid, root / case.variant)
        types = parameter_types(actor)
        sees = case.variant in seeing.KINDS
        sequences = seeing.batch(root / case.variant) if sees else make_batch().sequences
        micro = actor.micro_batches(sequences)[0]
        try:
            _learn(actor, micro, types)
        except spmd.SpmdTypeError as error:
            return str(error)
    return ""


def parameter_types(actor: Actor) -> dict[Tensor, object]:
    """V: the ranks have parts; R: the optimizer step sums the gradient over them; I: it does not. Not by any mark: by what
    becomes of gradients that tell the ranks apart."""
    parameters = [parameter for chunk in actor.ddp_chunks for parameter in chunk.parameters()]
    for chunk in actor.ddp_chunks:
        chunk.zero_grad_buffer()
    with device.megatron():
        sum((parameter * (actor.grid.rank + 1.0)).sum() for parameter in parameters).backward()
        actor.ddp_chunks[0].config.finalize_model_grads_func(actor.ddp_chunks, None)
    types: dict[Tensor, object] = {}
    for parameter in parameters:
        summed, cut = bool((parameter.main_grad == 3).all()), is_cut(parameter, actor)
        types[parameter] = (
            spmd.I if summed == cut else spmd.R if summed else spmd.V
        )  # a sum over different parts is wrong: refused as I
    return types


def is_cut(parameter: Tensor, actor: Actor) -> bool:
    """Whether the ranks have different values of a random model's parameter."""
    parts = [torch.empty_like(parameter) for _ in range(actor.grid.world)]
    torch.distributed.all_gather(parts, parameter.detach().contiguous())
    return not torch.equal(*parts)


def _learn(actor: Actor, micro: MicroBatch, types: dict[Tensor, object]) -> None:
    cut = actor.parallel.cp.size > 1
    ranks = (actor.parallel.cp if cut else actor.parallel.tp).group
    with (
        device.megatron(),
        spmd.set_current_mesh([ranks]),
        typecheck(strict_mode="strict"),
    ):  # the checker sees calls first
        for tensor, of in types.items():
            spmd.assert_type(tensor, {ranks: of})
        for module in actor.chunks[0].modules():
            held = vars(module) | vars(getattr(module, "token_dispatcher", module))
            for value in (*module.buffers(recurse=False), *held.values()):
                if isinstance(value, Tensor):
                    spmd.assert_type(value, {ranks: spmd.R})
        of_images = {} if micro.images is None else vars(micro.images)
        for name, value in (*vars(micro).items(), *of_images.items()):
            if isinstance(value, Tensor):
                spmd.assert_type(value, {ranks: spmd.V if cut and name in _OF_OWN_TOKENS else spmd.R})
        hidden = actor.forward(actor.ddp_chunks[0], micro, updates=True)
        spmd.assert_type(hidden, {ranks: spmd.V if cut or actor.config.parallel.sequence else spmd.I})
        log_probs, _ = actor.score(micro, hidden, 1.0, with_entropy=False)
        spmd.assert_type(log_probs, {ranks: spmd.I})
        log_probs.sum().backward()


# ------------------------------------------------------------------------------------ what Megatron's functions, and ours, do
def declare() -> None:
    """Says what the functions on the way compute, of values over ranks: the checker cannot look into them."""
    hooks: dict[type, Callable[..., object]] = {
        mappings._CopyToModelParallelRegion: _copied,
        mappings._ReduceFromModelParallelRegion: _reduced,
        mappings._ScatterToSequenceParallelRegion: _scattered,
        mappings._GatherFromSequenceParallelRegion: _gathered,
        mappings._ReduceScatterToSequenceParallelRegion: _reduce_scattered,
        layers.LinearWithGradAccumulationAndAsyncCommunication: _linear,
        head._TiledLogProbs: _log_probs,
        moe_utils.RouterGatingLinearFunction: _gated,
        mappings._AllToAll: _exchanged,
        deepstack._Rejoined: _rejoined,
    }
    router.TopKRouter.gating = _gating
    PackedAttention._gather = _gathered_tokens
    VisionLanguageModel._see = _seen
    for local in (utils.MakeViewlessTensor,):
        spmd.register_local_autograd_function(local)
    for function, hook in hooks.items():
        function.spmd_typecheck = staticmethod(hook)  # type: ignore[attr-defined]
        function.forward = staticmethod(_unchecked(function.forward))  # type: ignore[attr-defined]


def _unchecked(forward: Callable[..., object]) -> Callable[..., object]:
    """The collectives within are what the hook says."""

    @functools.wraps(forward)
    def run(*args: object) -> object:
        with spmd.no_typecheck():
            return forward(*args)

    return run


def _copied(*, input_, group):
    return rules.convert(input_, group, src=spmd.I, dst=spmd.R)


def _summand(value, group):
    """A value whose ranks have different parts of a sum: a product over cut columns, a lookup in cut rows."""
    return rules.reinterpret(value, group, src=spmd.V, dst=spmd.P)


def _reduced(*, input_, group):
    return rules.all_reduce(_summand(input_, group), group, src=spmd.P, dst=spmd.I)


def _scattered(*, input_, group):
    return rules.convert(input_, group, src=spmd.I, dst=spmd.V)


def _gathered(*, input_, group, tensor_parallel_output_grad):
    return rules.all_gather(input_, group, src=spmd.S(0), dst=spmd.R if tensor_parallel_output_grad else spmd.I)


def _reduce_scattered(*, input_, group):
    return rules.reduce_scatter(_summand(input_, group), group, src=spmd.P, dst=spmd.S(0))


def _linear(*, input, weight, bias, allreduce_dgrad, sequence_parallel, tp_group):
    if sequence_parallel:
        input = rules.all_gather(input, tp_group, src=spmd.S(0), dst=spmd.R)
    elif allreduce_dgrad:
        input = rules.convert(input, tp_group, src=spmd.I, dst=spmd.R)
    letters = "ab"[: input.ndim - 1]
    output = rules.einsum(f"{letters}k,nk->{letters}n", input, weight)
    return output if bias is None else rules.einsum(f"{letters}n,n->{letters}n", output, bias)


def _log_probs(*, hidden, weight, targets, shard):
    rules.ignore(targets)
    logits = rules.einsum("mk,nk->mn", hidden, weight)
    one = rules.einsum("mn->m", logits)
    if shard.group.size() == 1:
        return one, None
    return rules.all_reduce(_summand(one, shard.group), shard.group, src=spmd.P, dst=spmd.I), None


def _gating(router, input):
    """Computes the router's logits without moving its weight, as Megatron-Core does on a GPU."""
    dtype = torch.float32 if router.config.moe_router_dtype == "fp32" else input.dtype
    return moe_utils.router_gating_linear(input, router.weight, router.bias, dtype)


def _gated(*, inp, weight, bias):
    letters = "ab"[: inp.ndim - 1]
    output = rules.einsum(f"{letters}k,nk->{letters}n", inp, weight)
    return output if bias is None else rules.einsum(f"{letters}n,n->{letters}n", output, bias)


def _exchanged(*, group, input, output_split_sizes, input_split_sizes):
    rules.ignore(*(sizes for sizes in (output_split_sizes, input_split_sizes) if isinstance(sizes, Tensor)))
    return input if group.size() == 1 else rules.all_to_all(input, group, src=spmd.V, dst=spmd.V)


def _rejoined(*, embedded, leaves, features):
    """The features' gradients are the leaves', so both have to be of one type."""
    rules.ignore(*leaves, *features)
    for leaf, feature in zip(leaves, features, strict=True):
        spmd.assert_type(leaf, spmd.get_local_type(feature))
    return embedded


_see, _as_tensor = VisionLanguageModel._see, torch.as_tensor


def _seen(model, images):
    """Gives types to the pixels and sizes of images: they are the same on all ranks."""
    group = model.pg_collection.tp

    def same(values, **options):
        return spmd.assert_type(_as_tensor(values, **options), {group: spmd.R})

    with mock.patch.object(torch, "as_tensor", same):
        return _see(model, images)


_gather_tokens, _from_numpy = PackedAttention._gather, torch.from_numpy


def _gathered_tokens(attention, shard, lengths):
    """Gives types to the indices: where tokens lie is the same on all ranks, which are this rank's own is not."""
    group = attention.context_group

    def places(array):
        return spmd.assert_type(_from_numpy(array), {group: spmd.R})

    with mock.patch.object(torch, "from_numpy", places):
        whole, here = _gather_tokens(attention, shard, lengths)
    with spmd.no_typecheck():
        own = here.clone()
    return whole, spmd.assert_type(own, {group: spmd.V})
