"""GPT-OSS: fields of config.json that Megatron-Core or vLLM would not honour are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_rl.config.published import published_config
from megatron_rl.models import model_of

NAME = "gpt-oss-20b"
ROPE: dict[str, Any] = dict((published_config(NAME) or {})["rope_scaling"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"] * 12}, "layer_types.*vLLM alternates"),
        ({"sliding_window": None}, "no `sliding_window`"),
        ({"swiglu_limit": 8.0}, r"swiglu_limit` = 8.0 .* only 7\.0"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha"),
        ({"attention_bias": False}, "attention_bias` = False"),
        ({"experts_per_token": 8}, "experts_per_token` = 8"),
        ({"num_experts_per_tok": 33, "experts_per_token": 33}, "the model has 32 experts"),
        ({"initial_context_length": 8192}, "initial_context_length"),
        ({"rope_scaling": None}, "rope_type` = 'default' .* yarn alone"),
        ({"rope_scaling": {k: v for k, v in ROPE.items() if k != "beta_fast"}}, "no `beta_fast`, which vLLM reads"),
        ({"rope_scaling": {**ROPE, "attention_factor": 1.0}}, "attention_factor` = 1.0 .* vLLM does not read it"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_shared_experts": 1}, "num_shared_experts"),
    ],
)
def test_a_field_that_would_not_be_honoured_is_refused(changes: dict[str, Any], message: str) -> None:
    model_of(published_config(NAME) or {})
    with pytest.raises(ValueError, match=message):
        model_of({**(published_config(NAME) or {}), **changes})
