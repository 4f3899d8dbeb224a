"""Building a family's GPTModel on CPU in every layout, for the tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from megatron_rl.models import ModelDescription, ParallelGroups, padded_vocab_size
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

    from megatron_rl.runtime.cpu_megatron import install_rng_tracker, make_moe_importable

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(
        tensor,
        pipeline,
        virtual if virtual > 1 else None,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
    )
    install_rng_tracker()
    make_moe_importable()
    return ParallelGroups.from_megatron()


def stop() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def build(description: ModelDescription, parallel: ParallelGroups, virtual: int = 1) -> list[nn.Module]:
    """This process's model chunks, with parameters that no test expects to see again (NaN)."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_rl.runtime.cpu_megatron import MegatronOnCpu

    config = TransformerConfig(
        **description.transformer,
        tensor_model_parallel_size=parallel.tp.size,
        pipeline_model_parallel_size=parallel.pp.size,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        expert_model_parallel_size=parallel.ep.size,
        expert_tensor_parallel_size=parallel.expert_tp.size,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )
    model = dict(description.model, vocab_size=padded_vocab_size(description.dims["vocab"], parallel.tp.size))
    chunks = []
    with MegatronOnCpu():
        for stage in range(virtual):
            vp_stage = stage if virtual > 1 else None
            chunk = GPTModel(
                config,
                get_gpt_layer_local_spec(**description.spec, normalization="RMSNorm"),
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
                vp_stage=vp_stage,
                parallel_output=False,
                **model,
            )
            chunks.append(chunk)
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.fill_(float("nan"))
    return chunks


def logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """A whole model's logits, gathered over tensor-parallel ranks: [batch, length, padded vocabulary]."""
    from megatron_rl.runtime.cpu_megatron import MegatronOnCpu

    length = tokens.shape[1]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    model.eval()
    with torch.no_grad(), MegatronOnCpu():
        return model(tokens, torch.arange(length).expand_as(tokens), future)


def spawn(function: Callable[..., None], world: int, folder: Path, *arguments: object) -> None:
    """Run `function(rank, world, rendezvous file, *arguments)` in `world` processes; an error in one is raised here."""
    os.environ["OMP_NUM_THREADS"] = "1"
    ranks.start(function, world, world, str(folder / "rendezvous"), *arguments)
