"""GLM-4.5 and GLM-4.5-Air: grouped-query attention of which a part of each head turns, with DeepSeek-V3's experts."""

from __future__ import annotations

from megatron_rl.models.attention import ATTENTION, QK_NORMS, QKV_BIAS
from megatron_rl.models.experts import MOE_NORMS
from megatron_rl.models.family import NORMS, Family, ModelDescription, describe_decoder
from megatron_rl.models.grouped_experts import grouped_rules, with_grouped_experts
from megatron_rl.models.hf_config import JSON, Fields, HFConfig
from megatron_rl.models.rules import Rule

_BIAS, _NORM = "attention_bias", "use_qk_norm"
_TURNING = 0.5  # share of a head's dimensions where config.json does not say


def _flags(config: HFConfig) -> tuple[bool, bool]:
    """Whether the projections of attention have biases, and whether queries and keys are normalised."""
    fields = Fields(config, "glm4_moe")
    return fields.flag(_BIAS, False), fields.flag(_NORM, False)


def _describe(config: HFConfig) -> ModelDescription:
    bias, qk_norm = _flags(config)
    others: dict[str, JSON] = {"rms_norm_eps": 1e-5}
    others |= {name: value for name, value in config.items() if name not in (_BIAS, _NORM)}
    fields = Fields(others, "glm4_moe")
    dense = describe_decoder(fields, qk_norm=qk_norm, qkv_bias=bias, rotary_share=_TURNING)
    described = with_grouped_experts(dense, fields)
    fields.finish()
    return described


def _rules(config: HFConfig) -> tuple[Rule, ...]:
    bias, qk_norm = _flags(config)
    attention = (*ATTENTION, *(QKV_BIAS if bias else ()), *(QK_NORMS if qk_norm else ()))
    return grouped_rules(config, NORMS, MOE_NORMS, attention)


GLM4_MOE = Family(
    "glm4_moe",
    ("Glm4MoeForCausalLM",),
    _rules({"num_hidden_layers": 46, "first_k_dense_replace": 1, _BIAS: True}),
    _describe,
    rules_of=_rules,
)
