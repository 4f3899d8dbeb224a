"""DeepSeek-V3, R1 and Kimi-K2: multi-head latent attention, dense first layers, grouped and shared experts."""

from __future__ import annotations

from megatron_rl.models.family import Family, ModelDescription, Settings
from megatron_rl.models.grouped_experts import grouped_rules, with_grouped_experts
from megatron_rl.models.hf_config import Fields, HFConfig
from megatron_rl.models.multi_latent import (
    LATENT_ATTENTION,
    LATENT_DENSE_NORMS,
    LATENT_MOE_NORMS,
    latent_rope,
    latent_settings,
    read_latents,
)
from megatron_rl.models.rules import Rule

_EPSILON = 1e-6  # of transformers' norms of the latents, whatever config.json says


def _describe(config: HFConfig) -> ModelDescription:
    fields = Fields(config, "deepseek_v3")
    hidden, layers, vocab = (fields.integer(name) for name in ("hidden_size", "num_hidden_layers", "vocab_size"))
    ffn, max_positions = fields.integer("intermediate_size"), fields.integer("max_position_embeddings")
    attention = read_latents(fields)
    rope, rotary = latent_rope(fields, max_positions)
    fields.only("hidden_act", "silu")
    fields.only("attention_dropout", 0.0)
    fields.only("attention_bias", False)
    if (epsilon := fields.number("rms_norm_eps", _EPSILON)) != _EPSILON:
        fields.refuse(
            "rms_norm_eps", epsilon, f"the norms of the latents have {_EPSILON} in transformers and this in vLLM"
        )
    for name, value in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        if fields.absent(name):
            raise ValueError(f"config.json has no `{name}`, without which vLLM routes otherwise: set it to {value!r}")
    fields.quantisation()
    transformer: Settings = {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": attention.heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": epsilon,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": "silu",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        **latent_settings(attention),
        **rotary,
    }
    model: Settings = {
        "vocab_size": vocab,
        "max_sequence_length": max_positions,
        "share_embeddings_and_output_weights": fields.flag("tie_word_embeddings", False),
        "position_embedding_type": "rope",  # of latents: attention has its own
    }
    dims = {"layers": layers, "vocab": vocab, "hidden": hidden, **attention.dims, "ffn": ffn}
    described = with_grouped_experts(ModelDescription(dims, transformer, model, attention, rope), fields)
    fields.finish()
    return described


def _rules(config: HFConfig) -> tuple[Rule, ...]:
    return grouped_rules(config, LATENT_DENSE_NORMS, LATENT_MOE_NORMS, LATENT_ATTENTION)


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    ("DeepseekV3ForCausalLM",),
    _rules({"num_hidden_layers": 61, "first_k_dense_replace": 3}),
    _describe,
    rules_of=_rules,
)
