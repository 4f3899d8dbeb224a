"""Config mappings: published models are understood, and what would change the forward pass silently is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.published import published_config
from megatron_rl.models import family_for, model_of, read_hf_config


def published(architecture: str, sizes: tuple[int, ...], **other: Any) -> dict[str, Any]:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    names += ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    common = {"hidden_act": "silu", "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True}
    return {"architectures": [architecture], **common, **dict(zip(names, sizes, strict=True)), **other}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3["rope_type"] = "llama3"  # type: ignore[assignment]
WINDOW = {"use_sliding_window": False, "sliding_window": None}
MOE = {"decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts": 128, "num_experts_per_tok": 8}
MOE |= {"norm_topk_prob": True, "output_router_logits": False, "router_aux_loss_coef": 0.001, "head_dim": 128}

# config.json of published models (the fields that matter), and their published number of parameters
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen2.5-0.5B": (
        published(
            "Qwen2ForCausalLM",
            (151936, 896, 4864, 24, 14, 2, 32768),
            rope_theta=1000000.0,
            tie_word_embeddings=True,
            use_sliding_window=False,
            sliding_window=32768,
            max_window_layers=24,
            use_mrope=False,
        ),
        494_032_768,
    ),
    "DeepSeek-R1-Distill-Qwen-7B": (
        published(
            "Qwen2ForCausalLM",
            (152064, 3584, 18944, 28, 28, 4, 131072),
            rope_theta=10000,
            tie_word_embeddings=False,
            use_sliding_window=False,
            sliding_window=4096,
            max_window_layers=28,
            use_mrope=False,
        ),
        7_615_616_512,
    ),
    "Qwen3-8B": (
        published(
            "Qwen3ForCausalLM",
            (151936, 4096, 12288, 36, 32, 8, 40960),
            head_dim=128,
            rope_theta=1000000,
            rope_scaling=None,
            attention_bias=False,
            max_window_layers=36,
            **WINDOW,
        ),
        8_190_735_360,
    ),
    "Qwen3-30B-A3B": (
        published(
            "Qwen3MoeForCausalLM",
            (151936, 2048, 6144, 48, 32, 4, 40960),
            moe_intermediate_size=768,
            rope_theta=1000000.0,
            attention_bias=False,
            max_window_layers=48,
            **MOE,
            **WINDOW,
        ),
        30_532_122_624,
    ),
    "Qwen3-235B-A22B": (
        published(
            "Qwen3MoeForCausalLM",
            (151936, 4096, 12288, 94, 64, 4, 40960),
            moe_intermediate_size=1536,
            rope_theta=1000000.0,
            attention_bias=False,
            max_window_layers=94,
            **MOE,
            **WINDOW,
        ),
        235_093_634_560,
    ),
    "Llama-3.1-8B": (
        published(
            "LlamaForCausalLM",
            (128256, 4096, 14336, 32, 32, 8, 131072),
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            rope_scaling=LLAMA3,
            pretraining_tp=1,
            mlp_bias=False,
            attention_bias=False,
        ),
        8_030_261_248,
    ),
    "Llama-3.2-1B": (
        published(
            "LlamaForCausalLM",
            (128256, 2048, 8192, 16, 32, 8, 131072),
            head_dim=64,
            rope_theta=500000.0,
            rope_scaling={**LLAMA3, "factor": 32.0},
            tie_word_embeddings=True,
        ),
        1_235_814_400,
    ),
    "Qwen3-Coder-30B-A3B": (
        published(
            "Qwen3MoeForCausalLM",
            (151936, 2048, 6144, 48, 32, 4, 262144),
            moe_intermediate_size=768,
            rope_theta=10000000,
            max_window_layers=28,
            use_qk_norm=True,
            qkv_bias=False,
            shared_expert_intermediate_size=0,
            **MOE,
            **WINDOW,
        ),
        30_532_122_624,
    ),
    "Ministral-8B-2410": (
        published(
            "MistralForCausalLM",
            (131072, 4096, 12288, 36, 32, 8, 32768),
            head_dim=128,
            rope_theta=100000000.0,
            sliding_window=32768,
        ),
        8_019_808_256,
    ),
    "Mistral-7B-v0.3": (
        published("MistralForCausalLM", (32768, 4096, 14336, 32, 32, 8, 32768), rope_theta=1e6, sliding_window=None),
        7_248_023_552,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_understood(name: str) -> None:
    config, parameters = PUBLISHED[name]
    model, description = model_of(config), model_of(config).description
    total = sum(math.prod(t.sizes(model.dims)) for rule in model.weights() for t in rule.hf)
    assert total == parameters
    assert description.model["rotary_base"] == config["rope_theta"]
    assert description.transformer["num_query_groups"] == config["num_key_value_heads"]
    assert description.tied == config.get("tie_word_embeddings", False)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": "Qwen3ForCausalLM", "num_hidden_layers": 2.5},
        {"rope_scaling": "linear"},
        {"rope_parameters": {"rope_theta": "many"}},
        {"rope_parameters": {"rope_theta": 10**400}},
        {"rope_scaling": {"type": "linear", "factor": 10**400}},
        {"layer_types": 5},
        {"sliding_window": "wide"},
        {"max_window_layers": []},
        {"num_attention_heads": True},
    ],
)
def test_values_of_the_wrong_type_are_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"config.json: `({'|'.join(changes)})[`.]"):
        model_of(PUBLISHED["Qwen3-8B"][0] | {"use_sliding_window": True} | changes)


def test_a_scaling_is_the_same_under_both_names() -> None:
    config, _ = PUBLISHED["Llama-3.2-1B"]
    rope = family_for(config).describe(config).rope
    assert (rope.kind, rope.theta, rope.factor, rope.original) == ("llama3", 500000.0, 32.0, 8192)
    newer = {name: value for name, value in config.items() if name not in ("rope_scaling", "rope_theta")}
    newer["rope_parameters"] = {**config["rope_scaling"], "rope_theta": config["rope_theta"]}
    assert family_for(newer).describe(newer).rope == rope


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Qwen3-8B", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 30}, "use_sliding"),
        ("Qwen3-8B", {"layer_types": ["full_attention"] * 35 + ["sliding_attention"]}, "layer_types"),
        ("Qwen3-8B", {"attention_bias": True}, "attention_bias"),
        ("Llama-3.1-8B", {"attention_bias": True}, "attention_bias` = True changes the forward pass of `llama`"),
        ("Qwen2.5-0.5B", {"head_dim": 128}, "head_dim` = 128 .* hidden_size / num_attention_heads = 64"),
        ("Qwen3-8B", {"hidden_act": "gelu"}, "hidden_act"),
        ("Qwen3-8B", {"attention_dropout": 0.1}, "attention_dropout"),
        (
            "Qwen3-8B",
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            "rope_scaling.rope_type` = 'longrope'",
        ),
        ("Qwen3-8B", {"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section"),
        ("Qwen3-8B", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("Qwen3-8B", {"logit_softcapping": 30.0}, "logit_softcapping"),
        ("Qwen3-8B", {"hidden_size": None}, "no `hidden_size`"),
        ("Qwen3-8B", {"num_hidden_layers": "36"}, "num_hidden_layers` = '36'"),
        ("Qwen3-30B-A3B", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ("Qwen3-30B-A3B", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("Qwen3-30B-A3B", {"use_qk_norm": False}, "use_qk_norm"),
        ("Qwen3-30B-A3B", {"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window"),
        ("Llama-3.1-8B", {"mlp_bias": True}, "mlp_bias"),
        ("Llama-3.1-8B", {"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "low_freq_factor"),
        ("Llama-3.1-8B", {"rope_scaling": {**LLAMA3, "factor": None}}, "factor"),
        ("Llama-3.1-8B", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("Mistral-7B-v0.3", {"sliding_window": 4096}, "sliding_window"),
    ],
)
def test_what_the_map_cannot_honour_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    config = {**PUBLISHED[name][0], **changes}
    with pytest.raises(ValueError, match=message):
        family_for(config).describe(config)


def test_an_absent_mistral_window_means_4096() -> None:
    config = dict(PUBLISHED["Mistral-7B-v0.3"][0])
    del config["sliding_window"]
    with pytest.raises(ValueError, match="sliding_window"):
        family_for(config).describe(config)


@pytest.mark.parametrize("architectures", [["GemmaForCausalLM"], [], None])
def test_an_unknown_family_is_refused_by_name(architectures: list[str] | None) -> None:
    with pytest.raises(ValueError, match=r"Gemma|absent") as error:
        family_for({"architectures": architectures, "model_type": "gemma"})
    assert "Qwen3ForCausalLM" in str(error.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 10**31, True, "1e-6"])
def test_a_number_is_one_that_a_model_can_have(value: Any) -> None:
    config = {**PUBLISHED["Qwen3-8B"][0], "rms_norm_eps": value}
    with pytest.raises(ValueError, match=r"`rms_norm_eps` = .{1,80}, expected a number from 0 on"):
        model_of(config)


@pytest.mark.parametrize("value", ["two", True, 1.5, [1]])
def test_a_number_of_labels_is_a_number(value: Any) -> None:
    config = {**PUBLISHED["Qwen3-8B"][0], "architectures": ["Qwen3ForSequenceClassification"], "num_labels": value}
    with pytest.raises(ValueError, match="`num_labels`"):
        model_of(config)


def test_reading_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_hf_config(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        read_hf_config(tmp_path)
    for content in (b"{", b"\xff", b"[" * 100_000, b'{"a": ' + b"1" * 5000 + b"}"):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
            read_hf_config(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json is not a folder"):
        read_hf_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="expected an object"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("DeepSeek-V3", 671_026_419_200), ("Kimi-K2-Instruct", 1_026_408_232_448), ("GLM-4.5-Air", 106_852_251_264)],
)
def test_the_largest_models_are_counted_from_their_shapes(name: str, parameters: int) -> None:
    """Without the layers that predict further tokens: 671 B, 1 T and 106 B are published."""
    model = model_of(published_config(name) or {})
    assert sum(math.prod(t.sizes(model.dims)) for rule in model.weights() for t in rule.hf) == parameters


def test_what_megatron_refuses_or_cannot_turn_is_refused_beforehand() -> None:
    """Random layouts found both: one by an error at the start, one in the first forward pass."""
    experts, dense = PUBLISHED["Qwen3-30B-A3B"][0], PUBLISHED["Qwen3-8B"][0]
    with pytest.raises(ValueError, match="num_experts_per_tok = 1 with normalised weights"):
        model_of({**experts, "num_experts_per_tok": 1, "norm_topk_prob": True})
    assert model_of({**experts, "num_experts_per_tok": 1, "norm_topk_prob": False}).expert_count == 128
    with pytest.raises(ValueError, match="heads of 127 numbers"):
        model_of({**dense, "head_dim": 127})
