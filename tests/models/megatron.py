"""Building a family's GPTModel on CPU in every layout, for the tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import nn

from megatron_rl.actor.build import build_model
from megatron_rl.config.actor import ActorConfig, ParallelConfig
from megatron_rl.models import Family, Model, ModelDescription
from megatron_rl.runtime import device
from megatron_rl.weights.parallel import ParallelGroups
from tests import ranks


def start(
    rank: int,
    world: int,
    rendezvous: str,
    tensor: int = 1,
    pipeline: int = 1,
    expert: int = 1,
    virtual: int = 1,
    expert_tensor: int = 1,
) -> ParallelGroups:
    """Join the process group (rendezvous through a file) and make Megatron's."""
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(
        tensor,
        pipeline,
        virtual if virtual > 1 else None,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
    )
    return ParallelGroups.from_megatron()


def stop() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def build(family: Family, description: ModelDescription, parallel: ParallelGroups, virtual: int = 1) -> list[nn.Module]:
    """This process's model chunks, with parameters that no test expects to see again (NaN)."""
    layout = ParallelConfig(
        tensor=parallel.tp.size,
        pipeline=parallel.pp.size,
        virtual_pipeline=virtual,
        expert=parallel.ep.size,
        expert_tensor=parallel.expert_tp.size,
        sequence=parallel.tp.size > 1 and description.experts is not None,
    )
    with device.megatron(), torch.no_grad():
        chunks = build_model(Model(family, description), ActorConfig(parallel=layout), torch.float32)
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.fill_(float("nan"))
    return chunks


def logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """A whole model's logits, gathered over tensor-parallel ranks: [batch, length, padded vocabulary]; packed inside."""
    batch, length = tokens.shape
    offsets = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32)
    packed = PackedSeqParams(
        "thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=length, max_seqlen_kv=length
    )
    positions = torch.arange(length).repeat(batch)[None]
    model.eval()
    with torch.no_grad(), device.megatron():
        own = model(tokens.view(1, -1), positions, None, packed_seq_params=packed)
        return gather_from_tensor_model_parallel_region(own).view(batch, length, -1)


def spawn(function: Callable[..., None], world: int, folder: Path, *arguments: object) -> None:
    """Run `function(rank, world, rendezvous file, *arguments)` in `world` processes; an error in one is raised here."""
    os.environ["OMP_NUM_THREADS"] = "1"
    ranks.start(function, world, world, str(folder / "rendezvous"), *arguments)
