"""Memory of this rank by component, and settings that need less."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron_rl.actor.actor import Actor
from megatron_rl.config.schema import Config
from megatron_rl.runtime import device
from megatron_rl.runtime.memory_use import GIB
from megatron_rl.trainer.generator import GeneratorRun
from megatron_rl.trainer.run import Run


def memory_parts(run: Run | GeneratorRun) -> dict[str, float]:
    """GiB by what holds it, of what stays from step to step; activations and buffers are the rest of a phase's peak."""
    gib = _of_actor(run.learner.actor) if isinstance(run, Run) else {}
    if run.sampler.has_engine:
        rollout = run.config.rollout
        if device.has_gpu():
            total = torch.cuda.mem_get_info()[1] / GIB
            gib["engine while awake: weights, KV cache, graphs"] = rollout.memory_fraction * total
        else:
            gib["engine's KV cache"] = rollout.cpu_cache_gib
    return gib


def _of_actor(actor: Actor) -> dict[str, float]:
    gib = {
        "actor's weights": _gib(p for chunk in actor.chunks for p in chunk.parameters()),
        "gradients": _gib(b.grad_data for c in actor.ddp_chunks for b in [*c.buffers, *c.expert_parallel_buffers]),
        "optimizer state": _gib(actor.optimizer_state() if actor.has_optimizer else ()),
    }
    if actor.reference is not None:
        gib["reference policy, on the host"] = _gib(t for chunk in actor.reference for t in chunk.values())
    return gib


def _gib(tensors: Iterable[torch.Tensor]) -> float:
    """Tensors that share memory count once; those that were offloaded have none."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values()) / GIB


def remedies(phase: str, config: Config) -> list[str]:
    """Settings that take memory out of a phase, those that cost least first, each with its value now."""
    actor, rollout, parallel = config.actor, config.rollout, config.actor.parallel
    engine = [
        f"rollout.max_concurrent (now {rollout.max_concurrent}): fewer sequences at a time",
        f"rollout.memory_fraction (now {rollout.memory_fraction:g}): on a GPU, less if it ran out beside the engine, more if "
        "the engine says that its cache is too small",
        f"rollout.fp8 (now {rollout.fp8}): on a GPU, blockwise takes half of the memory of the engine's weights",
        f"rollout.cpu_cache_gib (now {rollout.cpu_cache_gib:g}): on a CPU",
        f"rollout.tensor_parallel (now {rollout.tensor_parallel}): more devices per engine",
    ]
    offload = (
        f"actor.offload (now {str(actor.offload).lower()}): gradients and optimizer on the host while the engine works; "
        f"actor.offload_weights (now {str(actor.offload_weights).lower()}): the weights too"
    )
    layout = [
        f"actor.parallel.tensor, pipeline (now {parallel.tensor}, {parallel.pipeline}): more devices per copy of the model"
    ]
    forward = [
        f"actor.logits_mib (now {actor.logits_mib}): fewer logits at a time; changes no result",
        f"actor.tokens_per_microbatch (now {actor.tokens_per_microbatch}): fewer tokens at a time; changes no result",
    ]
    if phase in ("generate", "evaluate"):
        return [*engine[:3], offload, engine[3]]
    if phase in ("sync", "switch"):
        return [offload, engine[1], *layout]
    if phase == "sync_check":
        return [f"rollout.sync_check_rollouts (now {rollout.sync_check_rollouts})", *forward, *layout]
    if phase in ("old_log_prob", "ref_log_prob", "estimate"):
        return [*forward, *layout]
    if phase == "update":
        return [
            *reversed(forward),
            f"actor.recompute (now {actor.recompute}): selective, then full",
            f"actor.optimizer.distributed (now {str(actor.optimizer.distributed).lower()}): state over all replicas",
            f"actor.optimizer.device (now {actor.optimizer.device}): on a GPU, cpu keeps the state on the host",
            f"actor.parallel.context (now {parallel.context}): more devices per sequence",
            *layout,
        ]
    if phase in ("checkpoint", "load", "export"):
        return [
            "host memory, which holds a copy of this rank's share: fewer processes per node, or a larger node",
            *layout,
        ]
    return [*engine[1:], *layout, "logging and data: tasks.train.*.size, where the data itself does not fit"]
