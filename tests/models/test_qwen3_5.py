"""Qwen3.5: packed sequences of odd lengths, what of its config.json is refused, and the count of a published shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_rl.checkpoint.convert import jobs
from megatron_rl.checkpoint.convert.layout import Layout
from megatron_rl.checkpoint.convert.to_hf import ToHF
from megatron_rl.checkpoint.convert.to_megatron import ToMegatron
from megatron_rl.models import model_of, read_hf_config
from megatron_rl.models.text_only import language_model
from megatron_rl.planning.memory import active_parameters, total_parameters
from megatron_rl.runtime import device
from megatron_rl.weights.load_hf import load_hf_weights
from megatron_rl.weights.parallel import ParallelGroups

from . import published, tiny
from .megatron import build, logits

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


@pytest.mark.parametrize("variant", ["qwen3_5", "qwen3_5-tied", "qwen3_5_moe"])
def test_a_published_folder_is_read_as_its_language_model(
    tmp_path: Path, parallel: ParallelGroups, variant: str
) -> None:
    folder = published.write(tmp_path / "model", variant)
    stored = load_file(folder / "model.safetensors")
    assert {name.split(".")[0] for name in stored} >= {"model", "mtp"}
    assert any(name.startswith("model.visual.") for name in stored)
    assert any(name.endswith("experts.gate_up_proj") for name in stored) == (variant == "qwen3_5_moe")
    config = read_hf_config(folder)
    model = model_of(config)
    [chunk] = build(model.family, model.description, parallel)
    load_hf_weights([chunk], model.family, config, folder, parallel)
    expected = tiny.hf_logits(folder)
    tolerance = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(logits(chunk, tiny.tokens())[..., : tiny.VOCAB], expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("variant", ["qwen3_5-tied", "qwen3_5_moe"])
def test_a_published_folder_is_converted_to_the_language_model_by_itself(tmp_path: Path, variant: str) -> None:
    """Conversion gives the files that transformers writes of the language model."""
    alone, folder = tiny.write(tmp_path / "alone", variant), published.write(tmp_path / "model", variant)
    jobs.run(ToMegatron(folder, Layout(2, 2, 2 if "moe" in variant else 1)), tmp_path / "megatron", 1, lambda _: None)
    jobs.run(ToHF(tmp_path / "megatron", tmp_path / "megatron"), tmp_path / "back", 1, lambda _: None)
    found, expected = {}, load_file(alone / "model.safetensors")
    for file in (tmp_path / "back").glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    architecture = "Qwen3_5MoeForCausalLM" if "moe" in variant else "Qwen3_5ForCausalLM"
    assert read_hf_config(tmp_path / "back")["architectures"] == [architecture]
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "back")).__name__ == architecture


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "text_config"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings.*text_config"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"layer_scale": True}, "layer_scale"),
        ({"text_config": {**SIZES, "layer_scale": True}}, "layer_scale"),
        ({"text_config": {**SIZES, "output_gate_type": "sigmoid"}}, "output_gate_type"),
    ],
)
def test_what_is_not_honoured_in_a_published_config_is_refused(changes: dict[str, Any], message: str) -> None:
    whole = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": {**SIZES, "tie_word_embeddings": False, "mtp_num_hidden_layers": 1},
        "vision_config": {"depth": 27},
        "image_token_id": 248056,
    }
    assert model_of(language_model(whole)).dims == model_of(SIZES).dims
    with pytest.raises(ValueError, match=message):
        model_of(language_model({**whole, **changes}))
