"""What a sequence takes in an engine's cache, against vLLM's own sizes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from megatron_rl.config.published import published_config
from megatron_rl.models import model_of
from megatron_rl.planning.memory import cache_bytes_per_token, state_tokens


def sizes(config: dict[str, Any], tensor: int) -> tuple[int, int]:
    """Returns bytes on a rank: a gated-delta layer's page, and a token in a layer of attention."""
    dtypes = MambaStateDtypeCalculator.gated_delta_net_state_dtype("bfloat16", "auto", config["mamba_ssm_dtype"])
    heads = [config[f"linear_num_{kind}_heads"] for kind in ("key", "value")]
    widths = [config[f"linear_{kind}_head_dim"] for kind in ("key", "value")]
    kernel = config["linear_conv_kernel_dim"]
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(tensor, *heads, *widths, kernel)
    state = MambaSpec(block_size=1, shapes=shapes, dtypes=dtypes)
    kv_heads = max(1, config["num_key_value_heads"] // tensor)
    token = FullAttentionSpec(block_size=1, num_kv_heads=kv_heads, head_size=config["head_dim"], dtype=torch.bfloat16)
    return state.page_size_bytes, token.page_size_bytes


@pytest.mark.parametrize(("name", "tensor"), [("Qwen3.5-4B", 1), ("Qwen3.5-27B", 4), ("Qwen3.6-35B-A3B", 2)])
def test_a_sequence_of_a_hybrid_model_takes_what_vllm_keeps_for_it(name: str, tensor: int) -> None:
    """vLLM keeps a state per gated-delta layer; the other layers have pages of that size, half a page empty in the mean."""
    config = published_config(name)
    assert config is not None
    model, text = model_of(config), dict(config.get("text_config", config))
    page, token = sizes(text, tensor)
    layers, every = text["num_hidden_layers"], text["full_attention_interval"]
    full = layers // every
    assert cache_bytes_per_token(model, tensor) == full * token
    expected = (page * (layers - full) + page / 2 * full) / (full * token)
    assert state_tokens(model, tensor) == pytest.approx(expected, rel=1e-6)
    assert expected > 1000


def test_a_model_of_attention_alone_keeps_nothing_beside_keys_and_values() -> None:
    for name in ("Qwen3-8B", "DeepSeek-V3"):
        config = published_config(name)
        assert config is not None
        assert state_tokens(model_of(config), 8) == 0
