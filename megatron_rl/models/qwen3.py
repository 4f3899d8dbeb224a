"""Qwen3, dense: RMS-normalised queries and keys, no biases."""

from __future__ import annotations

from megatron_rl.models.attention import ATTENTION, QK_NORMS
from megatron_rl.models.created import Sizes
from megatron_rl.models.family import (
    DENSE_MLP,
    NORMS,
    Family,
    ModelDescription,
    decoder_rules,
    describe_decoder,
    refuse_sliding_window,
)
from megatron_rl.models.hf_config import JSON, Fields, HFConfig


def _describe(config: HFConfig) -> ModelDescription:
    fields = Fields(config, "qwen3")
    description = describe_decoder(fields, head_dim=128, qk_norm=True)
    refuse_sliding_window(fields, description.dims["layers"])
    fields.finish()
    return description


QWEN3 = Family("qwen3", ("Qwen3ForCausalLM",), decoder_rules(NORMS, ATTENTION, QK_NORMS, DENSE_MLP), _describe)


def created_config(create: Sizes) -> dict[str, JSON]:
    """config.json of the model that `model.create` makes, as far as it differs from transformers' defaults."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": create.vocab_size,
        "hidden_size": create.hidden_size,
        "intermediate_size": create.ffn_size,
        "num_hidden_layers": create.layers,
        "num_attention_heads": create.heads,
        "num_key_value_heads": create.kv_heads,
        "head_dim": create.head_dim,
        "max_position_embeddings": create.max_positions,
        "initializer_range": create.init_std,
        "tie_word_embeddings": create.tie_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "pad_token_id": 0,
        "eos_token_id": 1,
        "dtype": "float32",
    }
