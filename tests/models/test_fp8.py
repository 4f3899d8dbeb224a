"""Block-wise FP8: which modules of a model, and what an engine is sent."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.base import block_fp8
from megatron_rl.config.published import published_config
from megatron_rl.models import fp8_weights as fp8
from megatron_rl.models import model_of

DENSE, EXPERTS = (model_of(published_config(name)) for name in ("Qwen3-8B", "Qwen3-30B-A3B"))


def test_matrices_of_attention_feed_forwards_and_experts_are_in_fp8() -> None:
    layer = [f"self_attn.{part}_proj" for part in "qkvo"]
    first = sorted(name for name in fp8.quantised_modules(EXPERTS) if name.startswith("model.layers.0."))
    assert first == sorted(f"model.layers.0.{name}" for name in (*layer, "mlp.experts"))
    assert len(fp8.quantised_modules(DENSE)) == 7 * DENSE.dims["layers"]
    kept = fp8.quantised_modules(EXPERTS, ["*.self_attn.[qkv]_proj", "model.layers.0.mlp.experts"])
    assert len(kept) == len(fp8.quantised_modules(EXPERTS)) - 3 * EXPERTS.dims["layers"] - 1


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        (["*.k_proj"], "names model.layers.0.self_attn.k_proj alone"),
        (["*.experts.3"], "matches no matrix"),
        (["model.layers.*"], "leaves no matrix"),
    ],
)
def test_what_an_engine_cannot_leave_out_is_refused(skip: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fp8.quantised_modules(EXPERTS, skip)


def test_the_engines_config_keeps_what_is_not_in_fp8() -> None:
    modules = fp8.quantised_modules(EXPERTS, ["model.layers.47.*"])
    kept = fp8.quantization_config(EXPERTS.family, EXPERTS.description, modules)["modules_to_not_convert"]
    assert isinstance(kept, list)
    assert {"lm_head", "model.layers.0.mlp.gate", "model.layers.47.mlp.experts"} <= set(kept)
    assert "model.layers.47.self_attn.q_proj" in kept
    assert "model.layers.0.mlp.experts" not in kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_on_a_cpu_is_sent_what_the_values_and_scales_stand_for(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    names = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.bias", "model.norm.weight")
    weights = {
        name: torch.randn((300, 200) if name == names[0] else 200, generator=generator).to(dtype) for name in names
    }
    modules = fp8.quantised_modules(DENSE)
    sent = dict(fp8.stored(weights.items(), modules, rounded=False))
    assert list(sent) == [names[0], names[0] + block_fp8.SCALE, *names[1:]]
    rounded = dict(fp8.stored(weights.items(), modules, rounded=True))
    assert list(rounded) == list(names)
    for name in names[1:]:
        assert rounded[name] is weights[name] is sent[name]
    rows, columns = (torch.arange(size) // 128 for size in (300, 200))
    wanted = sent[names[0]].float() * sent[names[0] + block_fp8.SCALE][rows[:, None], columns]
    assert torch.equal(rounded[names[0]], wanted.to(dtype))
    assert 0.01 < ((rounded[names[0]] - weights[names[0]]).norm() / weights[names[0]].norm()) < 0.04
    again, _ = block_fp8.quantise(wanted)
    assert torch.equal(again.view(torch.uint8), sent[names[0]].view(torch.uint8)), "rounding twice is rounding once"


def test_stacked_experts_are_rounded_one_by_one() -> None:
    weight = torch.randn(3, 256, 200, generator=torch.Generator().manual_seed(0))
    values, scales = block_fp8.quantise(weight)
    assert (values.shape, scales.shape) == (weight.shape, (3, 2, 2))
    for number, expert in enumerate(weight):
        own = block_fp8.quantise(expert)
        assert torch.equal(values[number].view(torch.uint8), own[0].view(torch.uint8))
        assert torch.equal(scales[number], own[1])
        assert torch.equal(block_fp8.dequantise(values, scales)[number], block_fp8.dequantise(*own))


def test_the_engines_names_of_what_is_in_fp8() -> None:
    modules = fp8.quantised_modules(EXPERTS, ["model.layers.0.*"])
    names = fp8.vllm_parameters(EXPERTS, modules)
    assert len(names) == 4 * (EXPERTS.dims["layers"] - 1)
    experts = "model.layers.1.mlp.experts.routed_experts"
    attention = "model.layers.1.self_attn"
    assert sorted(name for name in names if ".1." in name) == [
        *(f"{experts}.{name}_weight" for name in ("w13", "w2")),
        *(f"{attention}.{name}.weight" for name in ("o_proj", "qkv_proj")),
    ]
