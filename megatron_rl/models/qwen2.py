"""Qwen2 and Qwen2.5, and the DeepSeek-R1 distils on them: biases on query, key and value."""

from __future__ import annotations

from megatron_rl.models.attention import ATTENTION, QKV_BIAS
from megatron_rl.models.family import (
    DENSE_MLP,
    NORMS,
    Family,
    ModelDescription,
    decoder_rules,
    describe_decoder,
    refuse_sliding_window,
)
from megatron_rl.models.hf_config import Fields, HFConfig


def _describe(config: HFConfig) -> ModelDescription:
    fields = Fields(config, "qwen2")
    description = describe_decoder(fields, qkv_bias=True)
    refuse_sliding_window(fields, description.dims["layers"])
    head_dim, own = description.dims["head_dim"], description.dims["hidden"] // description.dims["heads"]
    if head_dim != own:
        fields.refuse("head_dim", head_dim, f"vLLM's Qwen2 knows only hidden_size / num_attention_heads = {own}")
    fields.finish()
    return description


QWEN2 = Family("qwen2", ("Qwen2ForCausalLM",), decoder_rules(NORMS, ATTENTION, QKV_BIAS, DENSE_MLP), _describe)
