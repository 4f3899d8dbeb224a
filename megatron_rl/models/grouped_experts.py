"""Experts as DeepSeek-V3 has them, and GLM-4.5 after it: sigmoid routing with groups and a bias per expert, shared experts
beside the routed ones, and first layers that are dense. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_rl.models.experts import MOE, Experts, in_layers
from megatron_rl.models.family import DENSE_MLP, ModelDescription, Settings, decoder_rules
from megatron_rl.models.hf_config import Fields, HFConfig
from megatron_rl.models.rules import Rule, Sharding, layer_rule

# Wang et al. 2024, auxiliary-loss-free balance: added to the scores by which experts are chosen, not to their weights.
_BIAS = layer_rule("mlp.router.expert_bias", Sharding.REPLICATED, ("mlp.gate.e_score_correction_bias", ("experts",)))
EXPERT_BIAS = replace(_BIAS, buffer=True)
SHARED_EXPERTS = (
    layer_rule(
        "mlp.shared_experts.linear_fc1.weight",
        Sharding.GATED,
        ("mlp.shared_experts.gate_proj.weight", ("shared_ffn", "hidden")),
        ("mlp.shared_experts.up_proj.weight", ("shared_ffn", "hidden")),
        engine="mlp.shared_experts.gate_up_proj.weight",
    ),
    layer_rule(
        "mlp.shared_experts.linear_fc2.weight",
        Sharding.ROW,
        ("mlp.shared_experts.down_proj.weight", ("hidden", "shared_ffn")),
    ),
)


def _dense_layers(fields: Fields) -> int:
    """Dense layers before those with experts."""
    first = fields.get("first_k_dense_replace", 0)
    return 0 if first == 0 else fields.integer("first_k_dense_replace", first)


def grouped_rules(
    config: HFConfig, dense_norms: Sequence[Rule], moe_norms: Sequence[Rule], attention: Sequence[Rule]
) -> tuple[Rule, ...]:
    """The weight map of a config.json's model: dense layers first, as many as it says."""
    fields = Fields(config, "grouped experts")
    layers, dense = fields.integer("num_hidden_layers"), _dense_layers(fields)
    first, others = range(min(dense, layers)), range(dense, layers)
    return decoder_rules(
        in_layers((*dense_norms, *DENSE_MLP), first) if dense else (),
        in_layers((*moe_norms, *MOE, EXPERT_BIAS, *SHARED_EXPERTS), others),
        tuple(attention),
    )


def with_grouped_experts(decoder: ModelDescription, fields: Fields) -> ModelDescription:
    """A dense decoder's description with the experts that config.json describes; refuses routing that Megatron-Core computes
    otherwise than transformers."""
    layers = decoder.dims["layers"]
    count, top_k = fields.integer("n_routed_experts"), fields.integer("num_experts_per_tok")
    ffn, dense = fields.integer("moe_intermediate_size"), _dense_layers(fields)
    shared, scaling = fields.integer("n_shared_experts") * ffn, fields.number("routed_scaling_factor", 1.0)
    groups, chosen_groups = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    fields.only("norm_topk_prob", True)
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    fields.only("moe_layer_freq", 1)
    for name in ("ep_size", "pretraining_tp", "aux_loss_alpha", "seq_aux"):  # how it was trained
        fields.get(name)
    if not 1 < top_k <= count:
        fields.refuse("num_experts_per_tok", top_k, f"a token goes to two of the {count} experts at least, or to more")
    if dense >= layers:
        fields.refuse("first_k_dense_replace", dense, f"none of its {layers} layers has experts")
    settings: Settings = {
        "num_moe_experts": count,
        "moe_ffn_hidden_size": ffn,
        "moe_shared_expert_intermediate_size": shared,
        "moe_router_topk": top_k,
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": float(scaling),
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_layer_freq": [int(layer >= dense) for layer in range(layers)],
    }
    if groups != chosen_groups:
        if count % groups or chosen_groups > groups:
            fields.refuse("n_group", groups, f"it must divide the {count} experts, and be more than topk_group")
        if top_k // chosen_groups != 2:
            fields.refuse("topk_group", chosen_groups, "Megatron-Core judges a group by its best two experts only where "
                          f"num_experts_per_tok ({top_k}) is twice as many")  # fmt: skip
        settings |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen_groups}
    predictors = fields.get("num_nextn_predict_layers", fields.get("num_mtp_layers", 0))
    if isinstance(predictors, bool) or not isinstance(predictors, int) or predictors < 0:
        raise ValueError(f"config.json: `num_nextn_predict_layers` = {predictors!r}, expected a number of layers")
    return decoder.with_experts(Experts(count, top_k, ffn, shared, field="n_routed_experts"), settings, predictors)
