"""What weights in FP8 take beside those in bf16, by arithmetic from the model's sizes and the recipe's layout. No torch."""

from __future__ import annotations

from megatron_rl.config.actor import ActorConfig
from megatron_rl.config.stages import stage_layers
from megatron_rl.models import Model
from megatron_rl.models.rules import Place, shard_shape
from megatron_rl.seams.fp8_sizes import weight_bytes


def fp8_weights(model: Model, actor: ActorConfig, stage: int) -> tuple[int, int]:
    """Numbers in the matrices that FP8 products read, on a rank of a stage, and their bytes in FP8; 0 without `actor.fp8`."""
    if actor.fp8 is None:
        return 0, 0
    parallel, ends, stages = actor.parallel, actor.fp8.bf16_ends, actor.parallel.pipeline
    layers = stage_layers(model.dims["layers"], stages, parallel.virtual_pipeline)[stage]
    layers = max(0, layers - ends * ((stage == 0) + (stage == stages - 1)))
    numbers = size = 0
    for rule in model.family.rules:
        if rule.place is not Place.LAYER or not rule.is_projection:
            continue
        copies = layers * (model.dims["experts"] // parallel.expert if rule.per_expert else 1)
        rows, columns = shard_shape(rule, model.dims, parallel.expert_tensor if rule.per_expert else parallel.tensor)
        numbers += copies * rows * columns
        size += copies * weight_bytes(rows, columns, actor.fp8.recipe)
    return numbers, size
