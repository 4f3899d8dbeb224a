"""Scalings of rotary embeddings: what transformers computes, beyond the positions that a model had before them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_rl.models import HFConfig, Model, model_of, read_hf_config
from megatron_rl.models.hf_config import Fields
from megatron_rl.models.rope import Rope, read_rope
from megatron_rl.modules.rotary import inverse_frequencies
from megatron_rl.runtime import device
from megatron_rl.weights.load_hf import load_hf_weights
from megatron_rl.weights.parallel import ParallelGroups

from . import tiny
from .megatron import build

YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 16.0, "original_max_position_embeddings": 16}
LLAMA3 = {**tiny.LLAMA3, "rope_theta": 100.0, "original_max_position_embeddings": 64}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
    "llama3": {**LLAMA3, "low_freq_factor": 0.5, "high_freq_factor": 3.0},
    "yarn": YARN,
    "yarn, not truncated": {**YARN, "truncate": False, "beta_fast": 2.0, "beta_slow": 0.25},
    "yarn, mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 2.0},
    "yarn, one mscale": {**YARN, "mscale_all_dim": 2.0, "mscale": 0.0},
    "yarn, attention factor": {**YARN, "attention_factor": 0.8, "mscale": 0.7, "mscale_all_dim": 2.0},
}
LENGTHS = (7, 113, 48, 31)  # packed


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("plain") / "model", "qwen3", num_hidden_layers=2)


def config_of(folder: Path, scaling: dict[str, Any]) -> dict[str, Any]:
    return read_hf_config(folder) | {"rope_parameters": scaling}


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(tiny.VOCAB, (1, length), generator=generator) for length in LENGTHS]


def packed_logits(folder: Path, config: HFConfig, model: Model, parallel: ParallelGroups) -> Tensor:
    [chunk] = build(model.family, model.description, parallel)
    load_hf_weights([chunk], model.family, config, folder, parallel)
    offsets = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    longest = max(LENGTHS)
    packed = PackedSeqParams(
        "thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    chunk.eval()
    with torch.no_grad(), device.megatron():
        logits: Tensor = chunk(torch.cat(sequences(), dim=1), positions, None, packed_seq_params=packed)
    return logits[0]


def transformers_logits(folder: Path, scaling: dict[str, Any]) -> Tensor:
    """Computes each sequence alone."""
    config = transformers.AutoConfig.from_pretrained(folder)
    config.rope_parameters = dict(scaling)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, attn_implementation="eager")
    with torch.no_grad():
        return torch.cat([model(tokens).logits[0] for tokens in sequences()])


@pytest.mark.parametrize("name", SCALINGS)
def test_packed_logits_are_those_of_transformers(plain: Path, parallel: ParallelGroups, name: str) -> None:
    scaling = SCALINGS[name]
    config = config_of(plain, scaling)
    model, expected = model_of(config), transformers_logits(plain, scaling)
    found = packed_logits(plain, config, model, parallel)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("theta", [100.0, 1e6])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers_bit_for_bit(plain: Path, name: str, theta: float) -> None:
    scaling = SCALINGS[name] | {"rope_theta": theta}
    rope = model_of(config_of(plain, scaling)).description.rope
    config = transformers.AutoConfig.from_pretrained(plain)
    config.rope_parameters, config.head_dim = dict(scaling), 128
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    assert torch.equal(inverse_frequencies(rope, 128), expected)
    assert rope.attention_factor == factor


CHANGES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.01, "theta": 101.0},
    "llama3": {"factor": 8.1, "original": 65, "low": 0.45, "high": 3.1},
    "yarn, not truncated": {
        "factor": 16.1,
        "original": 17,
        "beta_fast": 2.1,
        "beta_slow": 0.26,
        "truncate": True,
        "attention_factor": 1.28,
    },
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_number_is_felt(plain: Path, parallel: ParallelGroups, name: str) -> None:
    """A number that is a little off changes the logits by more than the comparison with transformers lets pass."""
    config = config_of(plain, SCALINGS[name])
    model = model_of(config)
    expected = packed_logits(plain, config, model, parallel)
    for field, value in CHANGES[name].items():
        rope = replace(model.description.rope, **{field: value})
        transformer = {**model.description.transformer, **rope.softmax_scale(model.dims["head_dim"])}
        changed = replace(model, description=replace(model.description, rope=rope, transformer=transformer))
        off = (packed_logits(plain, config, changed, parallel) - expected).abs().max()
        assert off > 1e-3 * expected.abs().max(), field


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (
            {"rope_type": "longrope", "factor": 4.0},
            "rope_type` = 'longrope'.* follow each sequence's length in transformers",
        ),
        ({"rope_type": "ntk", "factor": 4.0}, "supported are default, linear, dynamic, llama3 and yarn"),
        ({"rope_type": "yarn"}, "factor` = None"),
        ({**YARN, "factor": True}, "factor` = True"),
        (
            {**YARN, "factor": 8.0},
            "factor` = 8.0 .* stretches 16 positions to fewer than max_position_embeddings = 256",
        ),
        ({**YARN, "beta_fast": 0.5}, "beta_slow` = 1.0 .* at most beta_fast = 0.5"),
        ({**YARN, "beta_slow": 0}, "beta_slow` = 0, expected a positive number"),
        ({**YARN, "truncate": "no"}, "truncate` = 'no', expected true or false"),
        ({**YARN, "attention_factor": 0.0}, "attention_factor` = 0.0, expected a positive"),
        ({**YARN, "original_max_position_embeddings": 16.5}, "original_max_position_embeddings` = 16.5"),
        ({**YARN, "original_max_position_embeddings": 10**400}, "`original_max_position_embeddings` is too large"),
        ({**YARN, "low_freq_factor": 1.0}, "low_freq_factor` = 1.0 .* not known for rope type yarn"),
        ({**LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor` = 4.0 .* below high_freq_factor = 4.0"),
        ({"rope_type": "dynamic", "factor": 4.0, "alpha": 2.0}, "alpha` = 2.0 .* not known for rope type dynamic"),
        ({"rope_type": "dynamic"}, "factor` = None"),
        ({"rope_type": "default", "rope_theta": 1}, "rope_theta` = 1 .* greater than 1"),
    ],
)
def test_what_a_scaling_cannot_be_is_refused_by_name(plain: Path, scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_of(config_of(plain, scaling))


def test_transformers_prefers_the_original_length_beside_the_section(plain: Path) -> None:
    config = config_of(plain, YARN | {"original_max_position_embeddings": 32}) | {
        "original_max_position_embeddings": 16
    }
    assert model_of(config).description.rope.original == 16
    without = {name: value for name, value in YARN.items() if name != "original_max_position_embeddings"}
    assert model_of(config_of(plain, without)).description.rope.original == 256


def test_a_family_may_turn_a_part_of_its_heads() -> None:
    fields = Fields({"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5}}, "of parts")
    assert read_rope(fields, 256, share=0.25).arguments()["rotary_percent"] == 0.5
    assert read_rope(Fields({}, "of parts"), 256, share=0.25) == Rope(share=0.25)
    yarn = Fields({"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}, "of parts")
    with pytest.raises(ValueError, match=r"attention_factor` = 1.27.* a part of a head"):
        read_rope(yarn, 256, share=0.25)


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn"])
@pytest.mark.parametrize("variant", ["qwen3_5", "glm4_moe-norms"])
def test_the_part_that_turns_is_scaled_as_in_transformers(
    tmp_path: Path, parallel: ParallelGroups, variant: str, name: str
) -> None:
    folder = tiny.write(tmp_path / "model", variant, num_hidden_layers=4)
    scaling = SCALINGS[name] | {"partial_rotary_factor": 0.25} | ({"attention_factor": 1.0} if name == "yarn" else {})
    config, expected = config_of(folder, scaling), transformers_logits(folder, scaling)
    found = packed_logits(folder, config, model_of(config), parallel)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_a_part_of_a_head_has_no_attention_factor(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "model", "qwen3_5")
    with pytest.raises(ValueError, match=r"attention_factor` = 1.27.* a part of a head"):
        model_of(config_of(folder, YARN))  # a quarter turns where config.json does not say
