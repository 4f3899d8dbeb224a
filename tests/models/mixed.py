"""Families whose first layers are dense and whose others have experts, one with a buffer that its rules map."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.models import Family, HFConfig, ModelDescription
from megatron_rl.models.attention import ATTENTION, QK_NORMS
from megatron_rl.models.experts import MOE, MOE_NORMS, in_layers
from megatron_rl.models.family import DENSE_MLP, NORMS, decoder_rules
from megatron_rl.models.qwen3_moe import QWEN3_MOE
from megatron_rl.models.rules import Rule, Sharding, layer_rule

DENSE, LAYERS = 2, 4  # dense layers, and all
BIAS = replace(
    layer_rule("mlp.router.expert_bias", Sharding.REPLICATED, ("mlp.gate.e_score_correction_bias", ("experts",))),
    buffer=True,
)


def rules(*mixture: Rule) -> tuple[Rule, ...]:
    first, others = range(DENSE), range(DENSE, LAYERS)
    dense, experts = in_layers((*NORMS, *DENSE_MLP), first), in_layers((*MOE_NORMS, *mixture), others)
    return decoder_rules(dense, experts, ATTENTION, QK_NORMS)


def describe(config: HFConfig) -> ModelDescription:
    found = QWEN3_MOE.describe({**config, "mlp_only_layers": []})
    pattern = [int(layer >= DENSE) for layer in range(LAYERS)]
    return replace(found, transformer={**found.transformer, "moe_layer_freq": pattern})


FAMILY = Family("mixed", ("MixedForCausalLM", "Qwen3MoeForCausalLM"), rules(*MOE), describe)


def describe_biased(config: HFConfig) -> ModelDescription:
    found = describe(config)
    router = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    return replace(found, transformer={**found.transformer, **router, "moe_router_pre_softmax": False})


BIASED = replace(FAMILY, rules=rules(*MOE, BIAS), describe=describe_biased)
