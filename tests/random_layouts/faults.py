"""Faults put into ranks on purpose, most of them a mend of `megatron_rl` taken back: what the comparison has to see.

`python -m tests.random_layouts NUMBER --fault NAME`; the process that a case is compared with has none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from megatron.core.ssm.gated_delta_net import GatedDeltaNet

from megatron_rl.actor import actor, build, routing
from megatron_rl.checkpoint import gather_optimizer, store
from megatron_rl.modules import gpt
from megatron_rl.seams import megatron, megatron_gated_delta


def _changed(owner: Any, name: str, change: Callable[[Any], object]) -> None:
    """`change` is called with all that `owner.name` returns."""
    original = getattr(owner, name)

    @wraps(original)
    def changed(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        change(result)
        return result

    setattr(owner, name, changed)


def _built(change: Callable[[torch.nn.Module], None]) -> None:
    """`change` is called with every chunk of a model."""
    make = build.builder

    def builder(family: Any) -> Any:
        of_family = make(family)

        def built(*arguments: Any) -> Any:
            chunk = of_family(*arguments)
            change(chunk)
            return chunk

        return built

    build.builder = builder


def sinks() -> None:
    """Attention sinks are not marked as cut: the norm has the first rank's only."""
    gpt.set_tensor_model_parallel_attributes = lambda *_, **__: None


def expert_biases() -> None:
    """Biases of experts' second matrices keep Megatron-Core's mark, and are summed over tensor-parallel ranks too."""

    def marked(chunk: torch.nn.Module) -> None:
        for name, parameter in chunk.named_parameters():
            if ".mlp.experts." in name and name.endswith("linear_fc2.bias"):
                parameter.sequence_parallel = True  # type: ignore[attr-defined]

    _built(marked)


def gated_norm() -> None:
    """A gated-delta layer's norm has the gradient of one tensor-parallel rank."""
    megatron_gated_delta.GatedDeltaLayer._summed = lambda self, gradient: gradient  # type: ignore[method-assign]


def convolutions() -> None:
    """The weights of a gated-delta layer's convolution are read before they are gathered."""
    megatron_gated_delta.GatedDeltaLayer.forward = GatedDeltaNet.forward  # type: ignore[method-assign]


def per_token_loss() -> None:
    """Megatron-Core divides gradients by the number of ranks that share the data."""
    _changed(build, "transformer_config", lambda config: setattr(config, "calculate_per_token_loss", False))


def marks() -> None:
    """Weights are not marked as cut over tensor-parallel ranks: the norm has the first rank's only."""

    def unmarked(chunk: torch.nn.Module) -> None:
        for parameter in chunk.parameters():
            parameter.tensor_model_parallel = False  # type: ignore[attr-defined]

    _built(unmarked)


def router_biases() -> None:
    """Megatron-Core changes the routers' biases too, as it finalises gradients."""
    build.keep_biases_of_experts = lambda chunk: None


def local_loads() -> None:
    """Routers' biases follow the tokens of this rank alone."""
    original = torch.distributed.all_reduce

    def update(*arguments: Any) -> None:
        torch.distributed.all_reduce = lambda tensor, *_, **__: tensor
        try:
            routing.update_biases(*arguments)
        finally:
            torch.distributed.all_reduce = original

    actor.update_biases = update


def replay() -> None:
    """The router chooses again where it is to repeat a choice."""
    routing.LayerRouting.get_replay_topk = (  # type: ignore[method-assign]
        lambda self, scores, topk, groups, group_topk, choose: choose(scores, topk, groups, group_topk)
    )


def adam_steps() -> None:
    """All parameters of a loaded optimizer share one number of steps, to which each adds 1."""
    original = store.keeping_adam_steps

    @contextlib.contextmanager
    def sharing(optimizer: megatron.Optimizer) -> Iterator[None]:
        with original(optimizer):
            yield
        for part in megatron.optimizer_parts(optimizer):
            states = [state for state in part.optimizer.state.values() if "step" in state]
            for state in states:
                state["step"] = states[0]["step"]

    store.keeping_adam_steps = sharing


def buckets() -> None:
    """State that is saved is looked up as if there were no padding between a buffer's buckets."""
    original = gather_optimizer._gather

    def gather(optimizer: megatron.OptimizerPart, number: int, requests: Any) -> None:
        buckets: list[Any] = [*optimizer.buffers[number].buckets]
        offsets = [bucket.offset for bucket in buckets]
        for place, bucket in enumerate(buckets):
            bucket.offset = sum(before.numel_unpadded for before in buckets[:place])
        original(optimizer, number, requests)
        for bucket, offset in zip(buckets, offsets, strict=True):
            bucket.offset = offset

    gather_optimizer._gather = gather


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (
        *(sinks, expert_biases, gated_norm, convolutions, per_token_loss, marks),
        *(router_biases, local_loads, replay, adam_steps, buckets),
    )
}
