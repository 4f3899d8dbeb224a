"""What of a run holds memory on this rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron_rl.actor.actor import Actor
from megatron_rl.runtime import device
from megatron_rl.runtime.memory import GIB
from megatron_rl.seams.megatron import optimizer_parts
from megatron_rl.trainer.run import Run


def memory_parts(run: Run) -> dict[str, float]:
    """GiB by what holds it, of what stays from step to step; activations and buffers are the rest of a phase's peak."""
    actor = run.learner.actor
    parts = {
        "actor's weights": _gib(p for chunk in actor.chunks for p in chunk.parameters()),
        "gradients": _gib(_gradients(actor)),
        "optimizer state": _gib(_optimizer_state(actor)),
    }
    if actor.reference is not None:
        parts["reference policy, on the host"] = _gib(t for chunk in actor.reference for t in chunk.values())
    if run.sampler.has_engine:
        rollout = run.config.rollout
        if device.has_gpu():
            total = torch.cuda.mem_get_info()[1] / GIB
            parts["engine while awake: weights, KV cache, graphs"] = rollout.memory_fraction * total
        else:
            parts["engine's KV cache"] = rollout.cpu_cache_gib
    return parts


def _gib(tensors: Iterable[torch.Tensor]) -> float:
    """Tensors that share memory count once; those that were offloaded have none."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values()) / GIB


def _gradients(actor: Actor) -> Iterable[torch.Tensor]:
    for chunk in actor.ddp_chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            yield buffer.grad_data


def _optimizer_state(actor: Actor) -> Iterable[torch.Tensor]:
    if not actor.has_optimizer:
        return
    for part in optimizer_parts(actor.optimizer):
        inner = part.optimizer
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
        # the master copies of the weights
        yield from (p for group in inner.param_groups for p in group["params"] if p.dtype == torch.float32)
