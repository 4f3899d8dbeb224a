"""Tiny random models of every family, written by `transformers` itself: what the weight maps are checked against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Two value heads to a key head, and heads of different widths.
GATED_DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rms_norm_eps": 1e-2,  # outputs of a layer may be nearly zero, and their norm would magnify rounding
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
OTHER_TYPES = ["full_attention", "linear_attention", "full_attention", "linear_attention"]

# name -> (transformers' config class, what is special)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", {}),
    "qwen2-tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3-tied": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "llama": ("LlamaConfig", {"rms_norm_eps": 1e-2}),
    "llama3": (
        "LlamaConfig",
        {
            "head_dim": 16,
            "max_position_embeddings": 65536,
            "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 8192},
            "tie_word_embeddings": True,
        },
    ),
    "llama-linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}),
    "qwen3-yarn": ("Qwen3Config", {"head_dim": 16, "rope_parameters": YARN}),  # half the length of the tests' sequences
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "ministral": ("MinistralConfig", {"sliding_window": 256, "max_position_embeddings": 256, "head_dim": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 16, "norm_topk_prob": True}),
    # The published models' scaling, from 16 positions on, with a base at which it ends between two pairs of a small head, as
    # `truncate` may not leave it; every second layer has a window that is shorter than sequences.
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 16,
            "sliding_window": 10,
            "rope_parameters": {**YARN, "rope_theta": 100.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
        },
    ),
    "qwen3_moe-unnormalised": ("Qwen3MoeConfig", {"head_dim": 16, "norm_topk_prob": False}),
    "qwen3_5": ("Qwen3_5TextConfig", GATED_DELTA),
    "qwen3_5-tied": ("Qwen3_5TextConfig", {**GATED_DELTA, "layer_types": OTHER_TYPES, "tie_word_embeddings": True}),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {**GATED_DELTA, "shared_expert_intermediate_size": 40, "full_attention_interval": 2},
    ),
}
LATENTS = {
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    # Not in transformers' configuration, but in the published files, and vLLM reads them.
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
GROUPED = {
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
# Every field of it changes the frequencies of heads this small.
LATENT_YARN = {**YARN, "rope_theta": 100.0, "original_max_position_embeddings": 64, "beta_fast": 2.0, "beta_slow": 0.25}
LATENT_YARN |= {"mscale": 0.8, "mscale_all_dim": 1.0}
VARIANTS |= {
    "deepseek_v3": ("DeepseekV3Config", {**LATENTS, **GROUPED}),
    "deepseek_v3-yarn": (
        "DeepseekV3Config",
        {
            **LATENTS,
            **GROUPED,
            "rope_parameters": LATENT_YARN,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}
VARIANTS |= {
    "glm4_moe": ("Glm4MoeConfig", {**GROUPED, "head_dim": 16, "attention_bias": True}),
    "glm4_moe-norms": (
        "Glm4MoeConfig",
        {**GROUPED, "head_dim": 16, "use_qk_norm": True, "n_group": 1, "topk_group": 1, "partial_rotary_factor": 0.25},
    ),
}
VOCAB = 61  # odd: needs padding in every layout with tensor parallelism


def configuration(variant: str, **changes: Any) -> Any:
    """transformers' configuration of a variant."""
    import transformers

    name, special = VARIANTS[variant]
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    if "Moe" in name and not name.startswith("Glm"):
        sizes |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    return getattr(transformers, name)(**{**sizes, **special, **changes})


def write(folder: Path, variant: str, seed: int = 0, **changes: Any) -> Path:
    """A model folder with random values in every tensor, norms and biases included."""
    import transformers

    name, config = VARIANTS[variant][0], configuration(variant, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            one = "norm" in key and not (name.startswith("Qwen3_5") and "linear_attn" not in key)  # else 1 + weight
            # Some gates and up projections of GPT-OSS are beyond the limit of its activation.
            scale = 1.0 if name == "GptOssConfig" and key.endswith(("gate_up_proj", "sinks")) else 0.2
            parameter.copy_(1 + 0.3 * noise if one else (0.3 if "norm" in key else scale) * noise)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):  # as large as the differences between scores
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def tokens(batch: int = 2, length: int = 48) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(0))


def hf_logits(folder: Path) -> torch.Tensor:
    """What `transformers` makes of `tokens()`: float32 [batch, length, vocabulary]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(tokens()).logits
