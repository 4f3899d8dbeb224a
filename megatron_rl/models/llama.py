"""Llama 2 and 3.x (llama3 rope scaling included), the DeepSeek-R1 distils on them, Mistral and Ministral.

One architecture; Mistral adds a sliding window, which is refused where it would be felt.
"""

from __future__ import annotations

from megatron_rl.models.attention import ATTENTION
from megatron_rl.models.family import (
    DENSE_MLP,
    NORMS,
    Family,
    ModelDescription,
    decoder_rules,
    describe_decoder,
    sliding_window,
)
from megatron_rl.models.hf_config import Fields, HFConfig

_RULES = decoder_rules(NORMS, ATTENTION, DENSE_MLP)


def _describe_llama(config: HFConfig) -> ModelDescription:
    fields = Fields(config, "llama")
    fields.get("pretraining_tp")  # how the pretraining sliced its matrices; the product is the same
    description = describe_decoder(fields)
    fields.finish()
    return description


def _describe_mistral(config: HFConfig) -> ModelDescription:
    fields = Fields(config, "mistral")
    description = describe_decoder(fields)
    window, types = sliding_window(fields), fields.names("layer_types")
    slides = types is None or any(kind != "full_attention" for kind in types)
    if slides and window is not None and window < description.max_positions:
        fields.refuse("sliding_window", window, "it must be null or cover max_position_embeddings")
    fields.finish()
    return description


LLAMA = Family("llama", ("LlamaForCausalLM",), _RULES, _describe_llama)
MISTRAL = Family("mistral", ("MistralForCausalLM", "MinistralForCausalLM"), _RULES, _describe_mistral)
