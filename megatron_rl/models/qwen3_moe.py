"""Qwen3 mixture of experts (30B-A3B, 235B-A22B): Qwen3's attention, every MLP a router and its experts."""

from __future__ import annotations

from megatron_rl.models import qwen3
from megatron_rl.models.attention import ATTENTION, QK_NORMS
from megatron_rl.models.created import Sizes
from megatron_rl.models.experts import MOE, MOE_NORMS, Experts
from megatron_rl.models.family import (
    Family,
    ModelDescription,
    decoder_rules,
    describe_decoder,
    sliding_window,
)
from megatron_rl.models.hf_config import JSON, Fields, HFConfig


def _describe(config: HFConfig) -> ModelDescription:
    fields = Fields(config, "qwen3_moe")
    description = with_experts(describe_decoder(fields, qk_norm=True), fields)
    fields.finish()
    return description


def with_experts(dense: ModelDescription, fields: Fields, normalised: bool = False) -> ModelDescription:
    """A description with every feed-forward a mixture, as Qwen3's config.json describes one.

    `normalised`: whether the weights of a token's experts add up to 1 where `norm_topk_prob` does not say.
    """
    fields.only("decoder_sparse_step", 1)
    fields.only("mlp_only_layers", [])
    fields.only("use_qk_norm", True)  # set in Qwen3-Coder's config
    fields.get("max_window_layers")  # not used by this architecture: a window would be on every layer's
    if fields.flag("use_sliding_window", False) and sliding_window(fields) is not None:
        fields.refuse("use_sliding_window", True, "every layer must use full attention")
    experts = fields.integer("num_experts", fields.get("num_local_experts"))
    fields.only("num_local_experts", experts)  # transformers' other name of it
    expert_ffn = fields.integer("moe_intermediate_size")
    mixture = Experts(experts, fields.integer("num_experts_per_tok"), expert_ffn)
    return dense.with_experts(mixture, mixture.softmax_routing(fields.flag("norm_topk_prob", normalised)))


QWEN3_MOE = Family("qwen3_moe", ("Qwen3MoeForCausalLM",), decoder_rules(MOE_NORMS, ATTENTION, QK_NORMS, MOE), _describe)


def created_config(create: Sizes, experts: int) -> dict[str, JSON]:
    """As `qwen3.created_config`, every feed-forward a mixture of experts of a quarter of its size, of which a token takes
    four."""
    return {
        **qwen3.created_config(create),
        "architectures": list(QWEN3_MOE.architectures),
        "model_type": "qwen3_moe",
        "num_experts": experts,
        "num_experts_per_tok": min(4, experts),
        "moe_intermediate_size": create.ffn_size // 4,
        "norm_topk_prob": True,
    }
