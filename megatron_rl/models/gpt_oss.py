"""GPT-OSS (20B, 120B): attention sinks, windows in every second layer, biases everywhere, experts of a clamped SwiGLU.

Files have the experts of a layer stacked; the published ones have them in MXFP4, which is read as bf16.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.models.attention import ATTENTION, QKV_BIAS
from megatron_rl.models.expert_stacks import Stacking
from megatron_rl.models.experts import MOE, MOE_NORMS, Experts
from megatron_rl.models.family import Family, ModelDescription, Settings, decoder_rules, describe_decoder
from megatron_rl.models.hf_config import Fields, HFConfig
from megatron_rl.models.rules import Rule, Sharding, layer_rule

# vLLM has these built in (its activation `swigluoai`), whatever config.json says.
_ALPHA, _LIMIT = 1.702, 7.0
_SINKS: tuple[Rule, ...] = (
    layer_rule(
        "self_attention.core_attention.softmax_offset",
        Sharding.COLUMN,
        ("self_attn.sinks", ("heads",)),
    ),
)
_OUTPUT_BIAS = (
    layer_rule("self_attention.linear_proj.bias", Sharding.REPLICATED, ("self_attn.o_proj.bias", ("hidden",))),
)
_EXPERTS = (
    layer_rule("mlp.router.weight", Sharding.REPLICATED, ("mlp.router.weight", ("experts", "hidden"))),
    layer_rule("mlp.router.bias", Sharding.REPLICATED, ("mlp.router.bias", ("experts",))),
    replace(MOE[1], engine_interleaved=True),
    MOE[2],
    replace(
        layer_rule(
            ("mlp.experts.local_experts.{expert}.linear_fc1.bias", "mlp.experts.linear_fc1.bias{expert}"),
            Sharding.GATED,
            ("mlp.experts.{expert}.gate_proj.bias", ("expert_ffn",)),
            ("mlp.experts.{expert}.up_proj.bias", ("expert_ffn",)),
            engine="mlp.experts.routed_experts.w13_bias",
        ),
        engine_interleaved=True,
    ),
    replace(
        layer_rule(
            ("mlp.experts.local_experts.{expert}.linear_fc2.bias", "mlp.experts.linear_fc2.bias{expert}"),
            Sharding.REPLICATED,
            ("mlp.experts.{expert}.down_proj.bias", ("hidden",)),
            engine="mlp.experts.routed_experts.w2_bias",
        ),
        engine_summed=True,
    ),
)


def _describe(config: HFConfig) -> ModelDescription:
    quantised = config.get("quantization_config")
    if isinstance(quantised, dict) and quantised.get("quant_method") == "mxfp4":  # see `weights.stacked`
        config = {name: value for name, value in config.items() if name != "quantization_config"}
    fields = Fields(config, "gpt_oss")
    dense = describe_decoder(fields, head_dim=64, biases=True)
    layers, expert_ffn = dense.dims["layers"], dense.dims["ffn"]
    experts = fields.integer("num_local_experts", fields.get("num_experts"))
    fields.only("num_experts", experts)  # transformers' other name of it
    top_k = fields.integer("num_experts_per_tok", fields.get("experts_per_token"))
    fields.only("experts_per_token", top_k)
    mixture = Experts(experts, top_k, expert_ffn, biases=True, field="num_local_experts")
    routing = mixture.softmax_routing()
    fields.only("swiglu_alpha", _ALPHA)
    fields.only("swiglu_limit", _LIMIT)
    _read_rope(fields, dense)
    settings: Settings = {
        "activation_func": "quick_gelu",
        "activation_func_clamp_value": _LIMIT,
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
        "window_size": (fields.integer("sliding_window") - 1, 0),  # without the query's own token
        "window_attn_skip_freq": _windows(fields, layers),
        **routing,
    }
    fields.finish()
    return dense.with_experts(mixture, settings)


def _windows(fields: Fields, layers: int) -> list[int]:
    """1 for a layer with a window, 0 for one that sees everything: vLLM alternates them whatever config.json says."""
    expected = ["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(layers)]
    types = fields.names("layer_types")
    if types is not None and types != expected:
        fields.refuse("layer_types", types, "vLLM alternates sliding_attention and full_attention, in this order")
    return [1 if kind == "sliding_attention" else 0 for kind in expected]


def _read_rope(fields: Fields, dense: ModelDescription) -> None:
    """Refuses what vLLM's own reading of the section leaves out, or would not find."""
    if dense.rope.kind != "yarn":
        fields.refuse("rope_parameters.rope_type", dense.rope.kind, "vLLM computes this architecture with yarn alone")
    section = fields.section("rope_scaling") or fields.section("rope_parameters")
    for name in ("beta_fast", "beta_slow", "original_max_position_embeddings"):
        if name not in section:
            raise ValueError(f"config.json: the section for rope has no `{name}`, which vLLM reads in family `gpt_oss`")
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        if name in section:
            fields.refuse(f"rope_parameters.{name}", section[name], "vLLM does not read it in this architecture")
    fields.only("initial_context_length", dense.rope.original)


def _in_vllm(name: str) -> str:
    return name.replace(".self_attn.", ".attn.").replace("model.embed_tokens.", "model.embedding.")


_RULES = decoder_rules(MOE_NORMS, ATTENTION, QKV_BIAS, _OUTPUT_BIAS, _SINKS, _EXPERTS)
GPT_OSS = Family(
    "gpt_oss",
    ("GptOssForCausalLM",),
    tuple(rule.renamed_in_engine(_in_vllm) for rule in _RULES),
    _describe,
    stacking=Stacking(transposed=True, interleaved=True),
)
