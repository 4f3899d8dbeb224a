"""From a Hugging Face configuration and a recipe to Megatron-Core's model chunks and optimizer on this rank."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

import torch
from megatron.core import transformer
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron_rl.actor import fp8_training as fp8
from megatron_rl.actor.host_adam import HostAdam
from megatron_rl.config.actor import ActorConfig, OptimizerConfig, ParallelConfig
from megatron_rl.config.pipeline_split import chunk_layers
from megatron_rl.models import Model, ModelDescription, padded_vocab_size
from megatron_rl.modules.exact_layers import make_exact
from megatron_rl.modules.gpt import ACTIVATIONS
from megatron_rl.modules.registry import builder
from megatron_rl.runtime import device
from megatron_rl.seams.megatron import (
    Chunk,
    Optimizer,
    allow_fused_accumulation,
    copy_recomputed_outputs,
    initialize_adam,
    sum_gradients_undivided,
)
from megatron_rl.seams.megatron_cpu import install_rng_tracker
from megatron_rl.seams.megatron_hybrid import of_ones_own
from megatron_rl.seams.megatron_moe import forget_routing, keep_biases_of_experts

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(description: ModelDescription, actor: ActorConfig, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's configuration: what describes the model from its family, everything else from the recipe.

    Losses are sums over tokens divided by the whole minibatch's denominators (`calculate_per_token_loss`), so Megatron
    neither averages over micro-batches nor over data-parallel ranks.
    """
    activation = description.transformer["activation_func"]
    parallel, on_gpu = actor.parallel, device.has_gpu()
    transformer_engine = device.has_transformer_engine()
    if transformer_engine:
        allow_fused_accumulation()
    config_class: type[TransformerConfig] = getattr(transformer, description.attention.config_class)
    return config_class(
        **(description.transformer | {"activation_func": ACTIVATIONS[str(activation)]}),
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        sequence_parallel=parallel.sequence,
        # With two stages the interleaved schedule's batched messages between the same two ranks would be mixed up.
        overlap_p2p_comm=parallel.virtual_pipeline > 1,
        batch_p2p_comm=parallel.virtual_pipeline == 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        **uneven_stages(description.dims["layers"], parallel),
        bf16=dtype == torch.bfloat16,
        attention_softmax_in_fp32=True,
        variable_seq_lengths=True,
        calculate_per_token_loss=True,
        use_cpu_initialization=not on_gpu,
        # Every weight is loaded later, but only initialisation marks weights as sharded over tensor-parallel ranks; without
        # the mark the gradient norm silently leaves out every rank but the first.
        perform_initialization=True,
        # The weight gradient's matrix product adds to the fp32 sum itself: no bf16 gradient of each micro-batch in between.
        gradient_accumulation_fusion=transformer_engine,
        masked_softmax_fusion=False,
        bias_activation_fusion=transformer_engine and activation == "silu",  # fused for SiLU only
        # Megatron-Core refuses it with biases of experts.
        bias_dropout_fusion=transformer_engine and not (description.experts and description.experts.biases),
        # Of latent attention only YaRN's is fused, by a kernel of Megatron-Core's own that has not been tried.
        apply_rope_fusion=transformer_engine and not issubclass(config_class, transformer.MLATransformerConfig),
        persist_layer_norm=False,
        **_recomputation(actor),
        **_mixture_of_experts(actor, transformer_engine),
        **fp8.megatron_options(actor.fp8),
    )


def _recomputation(actor: ActorConfig) -> dict[str, str | int | list[str]]:
    """Megatron's options for what is computed again in the backward pass; none where everything is kept."""
    if actor.recompute == "none":
        return {}
    options: dict[str, str | int | list[str]] = {"recompute_granularity": actor.recompute}
    if actor.recompute == "selective":
        return options | {"recompute_modules": list(actor.recompute_modules)}
    if actor.recompute_layers is None:
        return options | {"recompute_method": "uniform", "recompute_num_layers": 1}
    return options | {"recompute_method": "block", "recompute_num_layers": actor.recompute_layers}


def _mixture_of_experts(actor: ActorConfig, transformer_engine: bool) -> dict[str, str | bool]:
    """Megatron's options for experts beside those of the family; the dispatcher also where there are none.

    Without the fused permutation a token's experts are added up by atomic additions, in an order that changes from run to
    run on a GPU: two passes over the same tokens would differ.
    """
    moe, deepep = actor.moe, actor.moe.dispatcher == "deepep"
    return {
        # These two take sequences of varying length; Megatron refuses the third whatever the model.
        "moe_token_dispatcher_type": "flex" if deepep else "alltoall",
        **({"moe_flex_dispatcher_backend": "deepep"} if deepep else {}),
        "moe_grouped_gemm": transformer_engine
        and not (actor.lora and actor.lora.experts),  # an adapter belongs to one matrix
        "moe_permute_fusion": transformer_engine,
        "moe_router_fusion": transformer_engine and moe.routing_replay == "none",  # the kernel chooses by itself
    }


def uneven_stages(layers: int, parallel: ParallelConfig) -> dict[str, int]:
    """Megatron's options for stages of different sizes; none where all are equal."""
    chunks = chunk_layers(layers, parallel.pipeline, parallel.virtual_pipeline)
    if chunks[0][0] < chunks[0][-1]:
        return {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    stages = [sum(counts) for counts in chunks]
    if len(set(stages)) == 1:
        return {}
    first = {"num_layers_in_first_pipeline_stage": stages[0]}
    # Of two stages the last is what remains; named as well, Megatron divides by the number of stages between them.
    return first | ({"num_layers_in_last_pipeline_stage": stages[-1]} if len(stages) > 2 else {})


def build_model(model: Model, actor: ActorConfig, dtype: torch.dtype, exactly: bool = False) -> list[Chunk]:
    """This rank's model chunks (one per virtual pipeline stage), uninitialised, on its device; `exactly`: `rollout.exact`."""
    with device.plain_layers() if exactly else contextlib.nullcontext():
        return _build_chunks(model, actor, dtype, exactly)


def _build_chunks(model: Model, actor: ActorConfig, dtype: torch.dtype, exactly: bool) -> list[Chunk]:
    if device.has_gpu():
        model_parallel_cuda_manual_seed(0)  # read by initialisation and dropout, neither of which matters here
    else:
        install_rng_tracker()
    copy_recomputed_outputs()
    config = transformer_config(model.description, actor, dtype)
    vocab_size = padded_vocab_size(model.dims["vocab"], actor.parallel.tensor)
    chunks, build, vision = [], builder(model.family), model.description.vision
    for stage in range(actor.parallel.virtual_pipeline):
        vp_stage = stage if actor.parallel.virtual_pipeline > 1 else None
        chunk = build(model.description, config, vocab_size, vp_stage)
        if vision is not None and actor.freeze_vision_tower and chunk.pre_process:
            chunk.get_submodule(vision.module).requires_grad_(False)
        if config.num_moe_experts is not None:
            forget_routing(chunk)
        chunks.append(chunk.to(device=device.device(), dtype=dtype) if actor.fp8 is None else chunk.to(device.device()))
        keep_biases_of_experts(chunks[-1])
        if exactly:
            make_exact(chunks[-1], model)
    return chunks


def wrap_for_training(
    chunks: list[Chunk], distributed_optimizer: bool, param_gather_fp8: bool, overlap: bool = False
) -> list[Chunk]:
    """Megatron's `DistributedDataParallel` around each chunk: flat gradient buffers, gradients summed in fp32.

    Args:
        overlap: see `actor.overlap`. Weights are sharded, and gathered, by the distributed optimizer only.
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=distributed_optimizer,
        check_for_nan_in_grad=False,  # reported by name in Actor.update, with the step's context
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and distributed_optimizer,
        fp8_param_gather=param_gather_fp8,
    )
    ddp_chunks = [
        DistributedDataParallel(config=chunk.config, ddp_config=ddp_config, module=chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(chunks)
    ]
    config = chunks[0].config
    sum_gradients_undivided(config)
    no_sync = [chunk.no_sync for chunk in ddp_chunks]
    config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return ddp_chunks


def build_optimizer(
    ddp_chunks: list[Chunk], config: OptimizerConfig, dtype: torch.dtype, fp8_recipe: str | None
) -> Optimizer:
    """Megatron's AdamW with fp32 master weights where parameters are bf16, its state sharded over data-parallel ranks."""
    moments = DTYPES[config.moments]
    made = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=config.distributed,
        fp8_recipe=fp8_recipe,
        use_precision_aware_optimizer=moments != torch.float32,
        exp_avg_dtype=moments,
        exp_avg_sq_dtype=moments,
        # Checkpoints hold whole fp32 masters, so that they load whatever the optimizer keeps them in.
        store_param_remainders=False,
    )
    with of_ones_own(made, HostAdam) if config.device == "cpu" else contextlib.nullcontext():
        optimizer: Optimizer = get_megatron_optimizer(made, ddp_chunks)
    initialize_adam(optimizer)
    return optimizer


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of `total_steps`: linear warm-up, then the schedule to `min_lr`.

    A pure function of the step: a run that resumes needs no scheduler state.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    span = max(1, total_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / span)
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "linear":
        return config.lr + (config.min_lr - config.lr) * done
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * done))  # cosine
