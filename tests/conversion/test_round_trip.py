"""Hugging Face -> Megatron -> Hugging Face is bit-identical, and other dtypes are what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from models import seeing, tiny
from safetensors.torch import load_file

from megatron_rl.base import block_fp8
from megatron_rl.checkpoint.convert.layout import Layout, chunks, state_names
from megatron_rl.checkpoint.convert.source import SourceModel
from megatron_rl.checkpoint.convert.verify import Logits, compare, compare_logits
from megatron_rl.weights.files import INDEX

from .convert import assert_same, tensors, to_hf, to_megatron

LAYOUTS = [Layout(), Layout(tensor=4, pipeline=2), Layout(tensor=2, pipeline=3)]  # the last uneven: 1, 2, 1 layers
MOE_LAYOUTS = [Layout(expert=8), Layout(2, 2, 4), Layout(4, 1, 2, expert_tensor=2), Layout(expert_tensor=8)]
EXPERT_FAMILIES = ("moe", "deepseek", "gpt_oss")
WITH_EXPERTS = [variant for variant in tiny.VARIANTS if any(name in variant for name in EXPERT_FAMILIES)]


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_there_and_back_is_bit_identical_at_every_layout(tmp_path: Path, variant: str) -> None:
    source = tiny.write(tmp_path / "source", variant)
    expected = tensors(source)
    for number, layout in enumerate(LAYOUTS + (MOE_LAYOUTS if variant in WITH_EXPERTS else [])):
        megatron, back = tmp_path / f"megatron-{number}", tmp_path / f"back-{number}"
        there = to_megatron(source, megatron, layout, file_bytes=80_000)
        again = to_hf(megatron, back, file_bytes=80_000)
        assert_same(tensors(back), expected)
        assert len(compare(there, megatron, 1)) == len(there.names()) >= len(expected)
        assert len(compare(again, back, 1)) == len(expected)
        assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())


@pytest.mark.parametrize("kind", seeing.KINDS)
def test_a_model_that_reads_images_comes_back_bit_identical(tmp_path: Path, kind: str) -> None:
    source = seeing.write(tmp_path / "source", kind=kind)
    expected = tensors(source)
    for number, layout in enumerate([Layout(tensor=2, pipeline=2), *([Layout(expert=4)] if "moe" in kind else [])]):
        megatron, back = tmp_path / f"megatron-{number}", tmp_path / f"back-{number}"
        to_megatron(source, megatron, layout, file_bytes=80_000)
        to_hf(megatron, back, file_bytes=80_000)
        assert_same(tensors(back), expected)
        assert (back / "config.json").read_bytes() == (megatron / "config.json").read_bytes()


def test_experts_are_cut_over_their_own_ranks(tmp_path: Path) -> None:
    model = SourceModel.read(tiny.write(tmp_path / "source", "qwen3_moe"))
    for layout in (Layout(tensor=4, expert=4), Layout(tensor=2, expert=4, expert_tensor=4)):
        cut = list(chunks(model, layout))
        down = {chunk.size for chunk in cut if chunk.name.endswith("experts.experts.linear_fc2.weight")}
        attention = {chunk.size for chunk in cut if chunk.name.endswith("linear_proj.weight")}
        assert down == {(1, 1, 32, 24 // layout.expert_tensor)}
        assert attention == {(1, 32, 64 // layout.tensor)}


def test_extra_states_are_those_of_transformer_engines_modules(tmp_path: Path) -> None:
    """Linear layers, norms and attention; per layer, per expert; but no embedding and no router."""
    sizes = {"num_hidden_layers": 2, "num_experts": 2, "num_experts_per_tok": 2}
    model = SourceModel.read(tiny.write(tmp_path / "source", "qwen3_moe", **sizes))
    attention = ("core_attention", "k_layernorm", "linear_proj", "linear_qkv", "q_layernorm")
    layer = ("pre_mlp_layernorm", *(f"self_attention.{module}" for module in attention))
    expected = {f"{module}._extra_state/shard_0_1" for module in ("decoder.final_layernorm", "output_layer")}
    for i in range(2):
        expected |= {f"decoder.layers.{module}._extra_state/shard_{i}_2" for module in layer}
        expected |= {
            f"decoder.layers.mlp.experts.experts.linear_fc{n}._extra_state/shard_{i}.{expert}_2.2"
            for n in (1, 2)
            for expert in range(2)
        }
    assert sorted(state_names(model)) == sorted(expected)


def test_the_shapes_of_real_models(tmp_path: Path) -> None:
    """128 experts, 2 key/value heads at tensor parallel 4, an odd vocabulary, bf16."""
    sizes = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 8, "num_hidden_layers": 2}
    source = tiny.write(tmp_path / "source", "qwen3_moe", **sizes, num_attention_heads=8, dtype="bfloat16")
    to_megatron(source, tmp_path / "megatron", Layout(4, 2, 8))
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert_same(tensors(tmp_path / "back"), tensors(source))


def test_what_belongs_to_a_model_comes_along(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source", "qwen3", num_hidden_layers=2)
    companions = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt", "LICENSE")
    for name in companions:
        (source / name).write_text(name)
    to_megatron(source, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back", file_bytes=20_000)
    for name in (*companions, "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()


def test_shards_are_those_that_the_index_names_and_no_larger_than_asked(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source", "llama", num_hidden_layers=2)
    to_megatron(source, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "back", file_bytes=20_000)
    index = json.loads((tmp_path / "back" / INDEX).read_text())
    files = sorted(path.name for path in (tmp_path / "back").glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    total = 0
    for file in files:
        held = load_file(tmp_path / "back" / file)  # the library reads what was written here
        assert {name for name, where in index["weight_map"].items() if where == file} == held.keys()
        size = sum(value.nbytes for value in held.values())
        assert size <= 20_000
        total += size
    assert total == index["metadata"]["total_size"]


@pytest.mark.parametrize(("dtype", "expected"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_a_dtype_is_rounded_to_once_and_said_in_the_config(tmp_path: Path, dtype: str, expected: torch.dtype) -> None:
    source = tiny.write(tmp_path / "source", "qwen2-tied", num_hidden_layers=2)
    to_megatron(source, tmp_path / "megatron")
    task = to_hf(tmp_path / "megatron", tmp_path / "back", dtype=dtype)
    assert_same(tensors(tmp_path / "back"), {name: value.to(expected) for name, value in tensors(source).items()})
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == str(expected).removeprefix("torch.")
    assert compare(task, tmp_path / "back", 1)


def test_fp8_is_within_half_a_step_of_every_weight_and_read_by_its_readers(tmp_path: Path) -> None:
    from transformers.utils.quantization_config import FineGrainedFP8Config
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    sizes = {"hidden_size": 192, "moe_intermediate_size": 136, "num_hidden_layers": 1, "num_experts": 2}
    source = tiny.write(tmp_path / "source", "qwen3_moe", **sizes, num_experts_per_tok=2)
    to_megatron(source, tmp_path / "megatron")
    task = to_hf(tmp_path / "megatron", tmp_path / "fp8", dtype="fp8")
    assert compare(task, tmp_path / "fp8", 1)
    before, after = tensors(source), tensors(tmp_path / "fp8")
    scaled = {name for name in before if name + block_fp8.SCALE in after}
    assert after.keys() == before.keys() | {name + block_fp8.SCALE for name in scaled}
    assert scaled == {name for name in before if "_proj." in name}
    for name, value in before.items():
        if name in scaled:
            values, scales = after[name], after[name + block_fp8.SCALE]
            assert values.dtype == torch.float8_e4m3fn
            assert scales.shape == (-(-value.shape[0] // 128), -(-value.shape[1] // 128))
            rows, columns = (torch.arange(size) // 128 for size in value.shape)
            step = scales[rows[:, None], columns]  # what every reader of the published format multiplies by
            error = (values.float() * step - value).abs()
            # e4m3 has 3 bits of mantissa: half a step is 1/16 of the value, or half of the smallest subnormal.
            assert (error <= torch.maximum(value.abs() / 16, step * 2.0**-10) * 1.0001).all(), name
        else:
            assert torch.equal(after[name], value.to(torch.bfloat16)), name
    said = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    theirs = FineGrainedFP8Config(**said)
    assert (theirs.weight_block_size, theirs.activation_scheme) == ([128, 128], "dynamic")
    engine = Fp8Config.from_config(said)
    assert engine.is_checkpoint_fp8_serialized
    assert engine.weight_block_size == [128, 128]
    assert "model.layers.0.mlp.gate" in engine.ignored_layers


def test_logits_of_a_reward_model_are_its_scores(tmp_path: Path) -> None:
    config = tiny.configuration("qwen3", num_hidden_layers=2, num_labels=1, pad_token_id=0)
    torch.manual_seed(0)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "hf")
    to_megatron(tmp_path / "hf", tmp_path / "megatron", Layout(2))
    compared = compare_logits(tmp_path / "hf", tmp_path / "megatron", tmp_path / "megatron", "keep")
    assert isinstance(compared, Logits)
    assert compared.relative < 1e-5 < compared.largest


def test_equal_logits_may_all_be_zero() -> None:
    assert Logits(0.0, 0.0, 1e-4).relative == 0


def test_logits_of_another_model_are_refused(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source", "qwen3", num_hidden_layers=1)
    other = tiny.write(tmp_path / "other", "qwen3", seed=1, num_hidden_layers=1)
    to_megatron(source, tmp_path / "megatron")
    with pytest.raises(ValueError, match=r"logits of .*other and .*megatron differ by up to"):
        compare_logits(other, tmp_path / "megatron", source, "keep")
