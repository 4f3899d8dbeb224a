"""Every field of config.json that transformers knows of a family is honoured, refused by name, or harmless."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import transformers

from megatron_rl.config.published import published_config
from megatron_rl.models import model_of
from megatron_rl.models.hf_config import INERT
from megatron_rl.models.text_only import language_model

# A published model, and transformers' configuration of its decoder.
FAMILIES = {
    "gpt-oss-20b": "GptOssConfig",
    "DeepSeek-V3": "DeepseekV3Config",
    "GLM-4.5-Air": "Glm4MoeConfig",
    "Qwen3.5-35B-A3B": "Qwen3_5MoeTextConfig",
    "Qwen3-VL-8B-Instruct": "Qwen3VLTextConfig",
    "Qwen3-VL-30B-A3B-Instruct": "Qwen3VLMoeTextConfig",
}
# Of any family: those of it that know a field not, refuse it.
OTHERS: dict[str, Any] = {
    "attention_bias": True,
    "attention_dropout": 0.1,
    "mlp_bias": True,
    "hidden_act": "gelu",
    "layer_types": ["chunked_attention"],
    "partial_rotary_factor": 0.3,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 2,
    "num_local_experts": 3,
    "num_experts": 3,
    "use_sliding_window": True,
    "sliding_window": 128,
    "max_window_layers": 1,
    "logits_soft_cap": 3.0,
}
_SCALED = "as transformers reads it, `rope_scaling` or `rope_parameters` goes before it"
_TOP = "beside a tower the top level says it"
_UNUSED = "no layer has a window without use_sliding_window, which is refused"
HARMLESS = {
    ("gpt-oss-20b", "rope_parameters"): _SCALED,
    ("gpt-oss-20b", "quantization_config"): "files say which tensors are in MXFP4",
    ("DeepSeek-V3", "rope_parameters"): _SCALED,
    ("DeepSeek-V3", "pretraining_tp"): "how it was trained",
    ("DeepSeek-V3", "ep_size"): "how it was trained",
    ("Qwen3.5-35B-A3B", "partial_rotary_factor"): _SCALED,
    ("Qwen3-VL-8B-Instruct", "rope_parameters"): _SCALED,
    ("Qwen3-VL-8B-Instruct", "sliding_window"): _UNUSED,
    ("Qwen3-VL-8B-Instruct", "max_window_layers"): _UNUSED,
    ("Qwen3-VL-30B-A3B-Instruct", "rope_parameters"): _SCALED,
    ("Qwen3-VL-30B-A3B-Instruct", "max_window_layers"): _UNUSED,
    ("Qwen3-VL-30B-A3B-Instruct", "tie_word_embeddings"): _TOP,
}
# Of which the message names another field, which no longer fits.
SIZES = {
    *("num_attention_heads", "num_experts", "num_local_experts", "num_experts_per_tok", "num_hidden_layers"),
    *("n_group", "topk_group", "head_dim", "hidden_size", "max_position_embeddings"),
}


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return 2 * value or 3
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, list):
        return value[::-1] if value[::-1] != value else [*value, 0]
    return {**value, "strange": 1} if isinstance(value, dict) else 3


@pytest.mark.parametrize("name", FAMILIES)
def test_a_field_is_honoured_or_harmless_or_refused_by_name(name: str) -> None:
    config: dict[str, Any] = copy.deepcopy(published_config(name)) or {}
    config = dict(language_model(config))
    text = config.get("text_config", config)
    theirs = getattr(transformers, FAMILIES[name])().to_dict()
    values = OTHERS | {field: changed(value) for field, value in (theirs | text).items()}
    before, ignored, unnamed = describe(config), set(), set()
    for field in values.keys() - INERT - {"vision_config"}:
        kept = dict(text)
        text[field] = values[field]
        try:
            ignored |= {field} if describe(config) == before else set()
        except ValueError as error:
            unnamed |= {field} if f"`{field}" not in str(error) and f".{field}`" not in str(error) else set()
        text.clear()
        text.update(kept)
    assert ignored == {field for family, field in HARMLESS if family == name}
    assert unnamed <= SIZES


def describe(config: dict[str, Any]) -> str:
    model = model_of(config)
    return repr((model.description, model.family.rules))
