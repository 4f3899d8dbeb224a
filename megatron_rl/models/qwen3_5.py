"""Qwen3.5 and Qwen3.6, dense and with experts: the language model, three gated-delta layers before each attention layer."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.models.attention import GroupedQuery
from megatron_rl.models.experts import MOE, MOE_NORMS, SHARED_EXPERT, Experts
from megatron_rl.models.family import DENSE_MLP, Family, ModelDescription, Settings, decoder_rules, describe_decoder
from megatron_rl.models.gated_delta import GatedDelta, attention_rules
from megatron_rl.models.hf_config import JSON, Fields, HFConfig
from megatron_rl.models.rules import MLP_NORM, Rule
from megatron_rl.models.text_only import without_axes

_TURNING = 0.25  # share of a head's dimensions where config.json does not say


def _linear(fields: Fields, layers: int) -> list[bool]:
    """Whether each layer is a gated-delta layer."""
    every = fields.integer("full_attention_interval", 4)
    default: list[JSON] = [
        "full_attention" if number % every == 0 else "linear_attention" for number in range(1, layers + 1)
    ]
    types = fields.names("layer_types") or default
    if len(types) != layers or {*types} - {"full_attention", "linear_attention"}:
        fields.refuse("layer_types", types, f"{layers} layers must use full_attention or linear_attention")
    return [kind == "linear_attention" for kind in types]


def _described(config: HFConfig, name: str) -> tuple[Fields, ModelDescription]:
    ffn = config.get("moe_intermediate_size")  # those with experts have no other
    fields = Fields({"intermediate_size": ffn, **without_axes(config)}, name)
    dense = describe_decoder(fields, head_dim=256, qk_norm=True, rotary_share=_TURNING)
    fields.only("attn_output_gate", True)
    fields.only("mamba_ssm_dtype", "float32")  # of the engine's state
    # Published Qwen3.6 has silu's other name.
    if fields.get("output_gate_type") != "swish":
        fields.only("output_gate_type", "silu")
    for unused in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
        fields.get(unused)  # layers that predict further tokens are no part of the model that is trained
    linear = _linear(fields, dense.dims["layers"])
    assert isinstance(dense.attention, GroupedQuery)
    attention = GatedDelta(
        full=dense.attention,
        layers=len(linear),
        delta_layers=sum(linear),
        key_heads=fields.integer("linear_num_key_heads", 16),
        value_heads=fields.integer("linear_num_value_heads", 32),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        kernel=fields.integer("linear_conv_kernel_dim", 4),
    )
    if attention.value_heads % attention.key_heads:
        fields.refuse(
            "linear_num_value_heads",
            attention.value_heads,
            f"a multiple of linear_num_key_heads = {attention.key_heads}",
        )
    settings: Settings = {
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(is_linear) for is_linear in linear],
        "linear_conv_kernel_dim": attention.kernel,
        "linear_key_head_dim": attention.key_dim,
        "linear_value_head_dim": attention.value_dim,
        "linear_num_key_heads": attention.key_heads,
        "linear_num_value_heads": attention.value_heads,
    }
    return fields, replace(
        dense,
        dims={**dense.dims, **attention.dims},
        transformer={**dense.transformer, **settings},
        attention=attention,
    )


def _describe(config: HFConfig) -> ModelDescription:
    fields, description = _described(config, "qwen3_5")
    fields.finish()
    return description


def _describe_moe(config: HFConfig) -> ModelDescription:
    fields, dense = _described(config, "qwen3_5_moe")
    experts = Experts(
        fields.integer("num_experts", 256),
        fields.integer("num_experts_per_tok", 8),
        fields.integer("moe_intermediate_size", 512),
        fields.integer("shared_expert_intermediate_size", 512),
    )
    shared: Settings = {"moe_shared_expert_intermediate_size": experts.shared, "moe_shared_expert_gate": True}
    described = dense.with_experts(experts, {**experts.softmax_routing(), **shared})
    fields.only("norm_topk_prob", True)
    fields.finish()
    return described


def _rules(config: HFConfig, *feed_forward: Rule) -> tuple[Rule, ...]:
    fields = Fields(config, "qwen3_5")
    linear = _linear(fields, fields.integer("num_hidden_layers"))
    return decoder_rules(attention_rules(linear), feed_forward)


def _dense_rules(config: HFConfig) -> tuple[Rule, ...]:
    return _rules(config, MLP_NORM, *DENSE_MLP)


def _moe_rules(config: HFConfig) -> tuple[Rule, ...]:
    return _rules(config, MOE_NORMS[1], *MOE, *SHARED_EXPERT)


# Which layers have which attention is in config.json; without it, every fourth is a full one.
_DEFAULT: HFConfig = {"num_hidden_layers": 4}
QWEN3_5 = Family(
    "qwen3_5", ("Qwen3_5ForCausalLM",), _dense_rules(_DEFAULT), _describe, rules_of=_dense_rules, is_inside=True
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe",
    architectures=("Qwen3_5MoeForCausalLM",),
    rules=_moe_rules(_DEFAULT),
    describe=_describe_moe,
    rules_of=_moe_rules,
)
