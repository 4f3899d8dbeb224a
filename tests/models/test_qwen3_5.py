"""Qwen3.5: packed sequences of odd lengths, what of its config.json is refused, and the count of a published shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from transformers import AutoModelForCausalLM

from megatron_rl.models import model_of, read_hf_config
from megatron_rl.planning.memory import active_parameters, total_parameters
from megatron_rl.runtime import device
from megatron_rl.weights.load_hf import load_hf_weights
from megatron_rl.weights.parallel import ParallelGroups

from . import tiny
from .megatron import build

LENGTHS = (1, 37, 5, 70, 16)  # shorter than the convolution, and across chunks of 16 and 64


@pytest.mark.parametrize("variant", ["qwen3_5", "qwen3_5-tied", "qwen3_5_moe"])
def test_packed_sequences_of_odd_lengths_do_not_see_each_other(
    tmp_path: Path, parallel: ParallelGroups, variant: str
) -> None:
    folder = tiny.write(tmp_path / "model", variant)
    config = read_hf_config(folder)
    model = model_of(config)
    [chunk] = build(model.family, model.description, parallel)
    load_hf_weights([chunk], model.family, config, folder, parallel)
    tokens = torch.randint(tiny.VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    packed = PackedSeqParams(
        "thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS)
    )
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = torch.cat([reference(part[None], use_cache=False).logits[0] for part in tokens.split(LENGTHS)])
        with device.megatron():
            logits = chunk.eval()(tokens[None], positions, None, packed_seq_params=packed)[0]
    torch.testing.assert_close(logits[:, : tiny.VOCAB], expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


# The published sizes of Qwen3.5-35B-A3B, which transformers' configuration has as defaults.
SIZES: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 262144,
}


def test_a_published_shape_has_the_size_of_its_name() -> None:
    model = model_of(SIZES)
    assert 34e9 < total_parameters(model) < 36e9
    assert 2.5e9 < active_parameters(model) < 3.5e9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3_5MoeForConditionalGeneration"]}, r"transformers\.Qwen3_5MoeForCausalLM"),
        ({"layer_types": ["sliding_attention"] * 40}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor"),
        ({"num_experts_per_tok": 300}, "num_experts_per_tok"),
        ({"layer_scale": True}, "layer_scale"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
    ],
)
def test_what_is_not_honoured_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_of({**SIZES, **changes})
