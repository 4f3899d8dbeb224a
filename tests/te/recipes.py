"""Every layout of the GPU recipes, small: model, gradient buffers and optimizer as the first rank of each stage has them."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_rl.actor import build
from megatron_rl.config.actor import ActorConfig
from megatron_rl.models import Model, model_of
from megatron_rl.runtime import device


def build_configurations(cases: str) -> None:
    """Megatron's configuration and Transformer Engine's FP8 recipe of each [`actor`, the model's config.json], as JSON."""
    from megatron.core.enums import Fp8Recipe
    from megatron.core.fp8_utils import get_fp8_recipe, is_first_last_bf16_layer

    for actor, model in json.loads(cases):
        config = _actor(actor)
        with device.megatron():
            found = build.transformer_config(model_of(model).description, config, build.DTYPES["bfloat16"])
        assert found.gradient_accumulation_fusion
        assert found.moe_permute_fusion
        assert found.moe_router_dtype == ("fp32" if found.num_moe_experts else None)
        if config.fp8 is not None:
            recipe = get_fp8_recipe(found)
            assert recipe.float8_block_scaling() == (found.fp8_recipe == Fp8Recipe.blockwise), recipe
            config.fp8.bf16_ends = 2
            with device.megatron():
                found = build.transformer_config(model_of(model).description, config, build.DTYPES["bfloat16"])
            exact = [layer for layer in range(found.num_layers) if is_first_last_bf16_layer(found, layer)]
            assert exact == [0, 1, found.num_layers - 2, found.num_layers - 1]


def build_stages(world: int, actor: str, small: str) -> None:
    """Builds each pipeline stage of a layout, with Transformer Engine's modules; no other process is needed.

    Args:
        actor: the recipe's, as JSON.
        small: a small model's config.json.
    """
    config = _actor(json.loads(actor))
    model = model_of(json.loads(small))
    per_stage = world // config.parallel.pipeline
    for stage in range(config.parallel.pipeline):
        _build_stage(config, model, stage * per_stage, world)


def build_with_deepep(world: int, actor: str, small: str) -> None:
    """The same with `dispatcher: deepep`. Its package is not here, and two of its names have to be for that."""
    from megatron.core.transformer.moe import token_dispatcher

    values = json.loads(actor)
    values["moe"]["dispatcher"] = "deepep"
    token_dispatcher.fused_dispatch, token_dispatcher.set_deepep_num_sms = build_with_deepep, int
    build_stages(world, json.dumps(values), small)


def _actor(values: dict[str, Any]) -> ActorConfig:
    from omegaconf import OmegaConf

    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ActorConfig), values))
    assert isinstance(config, ActorConfig)
    return config


def _build_stage(config: ActorConfig, model: Model, rank: int, world: int) -> None:
    from megatron.core import parallel_state
    from megatron.core.extensions.transformer_engine import TEGroupedLinear, TELayerNormColumnParallelLinear
    from transformer_engine.pytorch.optimizers import FusedAdam

    new_group, parallel = dist.new_group, config.parallel
    dist.new_group = lambda *arguments, **options: new_group(*arguments, **{**options, "backend": "fake"})
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with device.megatron():
            parallel_state.initialize_model_parallel(
                parallel.tensor,
                parallel.pipeline,
                parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
                context_parallel_size=parallel.context,
                expert_model_parallel_size=parallel.expert,
                expert_tensor_parallel_size=parallel.expert_tensor,
            )
            dtype = build.DTYPES["bfloat16"]
            chunks = build.build_model(model, config, dtype)
            kinds = {type(module) for chunk in chunks for module in chunk.modules()}
            assert TELayerNormColumnParallelLinear in kinds
            layers = {layer.layer_number - 1 for chunk in chunks for layer in chunk.decoder.layers}
            assert any(issubclass(kind, TEGroupedLinear) for kind in kinds) == bool(layers & set(model.expert_layers))
            wrapped = build.wrap_for_training(chunks, config.optimizer.distributed, False, overlap=True)
            assert all(chunk.ddp_config.overlap_param_gather for chunk in wrapped)
            recipe = config.fp8.recipe if config.fp8 is not None else None
            optimizer = build.build_optimizer(wrapped, config.optimizer, dtype, recipe)
            assert all(isinstance(part.optimizer, FusedAdam) for part in optimizer.chained_optimizers)
            parallel_state.destroy_model_parallel()
    finally:
        dist.destroy_process_group()
        dist.new_group = new_group
