"""Every part of a model is felt by the comparison with transformers: without it, or a little off, logits are others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_rl.actor.packing import pack
from megatron_rl.models import ModelDescription, model_of, read_hf_config
from megatron_rl.models.qwen3_vl import interleaved
from megatron_rl.modules import gated_delta_layers
from megatron_rl.runtime import device
from megatron_rl.weights.load_hf import load_hf_weights
from megatron_rl.weights.parallel import ParallelGroups

from . import seeing, tiny
from .megatron import build, logits

Description = Callable[[ModelDescription], ModelDescription] | None
Weights = Callable[[nn.Module], None] | None
FELT = 1e-3  # a hundred times what the comparison with transformers lets pass
ROPE, SETTING, MODEL = "rope", "transformer", "model"  # fields of a description
DESCRIBED: list[tuple[str, str, str, Any]] = [
    ("gpt_oss", ROPE, "truncate", True),
    ("gpt_oss", SETTING, "window_size", (10, 0)),
    ("gpt_oss", SETTING, "window_size", (8, 0)),
    ("gpt_oss", SETTING, "window_attn_skip_freq", [0, 1, 0, 1]),
    ("gpt_oss", SETTING, "activation_func_clamp_value", 6.5),
    ("gpt_oss", SETTING, "glu_linear_offset", 0.0),
    ("deepseek_v3", SETTING, "moe_router_topk_scaling_factor", 2.4),
    ("deepseek_v3", SETTING, "moe_router_num_groups", 8),
    ("glm4_moe", SETTING, "moe_router_group_topk", 4),
    ("glm4_moe", MODEL, "rotary_percent", 1.0),
    ("qwen3_5", MODEL, "rotary_percent", 0.5),
]
ZERO, NEGATIVE, NONE = 0.0, -1.0, float("-inf")
WEIGHTS: list[tuple[str, str, float]] = [  # what ends a parameter's name, and what it is multiplied by, or filled with
    ("gpt_oss", "softmax_offset", NONE),
    ("gpt_oss", "softmax_offset", NEGATIVE),
    ("gpt_oss", "router.bias", ZERO),
    ("gpt_oss", "linear_qkv.bias", ZERO),
    ("gpt_oss", "linear_proj.bias", ZERO),
    ("gpt_oss", "linear_fc1.bias", ZERO),
    ("gpt_oss", "linear_fc2.bias", ZERO),
    ("deepseek_v3", "expert_bias", ZERO),
    ("deepseek_v3", "expert_bias", NEGATIVE),
    ("glm4_moe", "expert_bias", ZERO),
    ("glm4_moe", "expert_bias", NEGATIVE),
    ("glm4_moe", "linear_qkv.bias", ZERO),
    ("qwen3_5", "A_log", NEGATIVE),
    ("qwen3_5", "dt_bias", ZERO),
    ("qwen3_5", "conv1d.weight", NEGATIVE),
    ("qwen3_5_moe", "shared_experts.gate_weight", NEGATIVE),
]


SECTIONS = [(7, 5, 4), (6, 6, 4), (8, 3, 5)]  # Qwen3-VL's are (8, 4, 4)


class Felt:
    """How far a model's logits are off, as a share of the largest, from those of the same model unchanged."""

    def __init__(self, root: Path, parallel: ParallelGroups) -> None:
        self._root, self._parallel = root, parallel
        self._unchanged: dict[str, Tensor] = {}

    def off(self, variant: str, description: Description = None, weights: Weights = None, source: Any = tiny) -> float:
        if variant not in self._unchanged:
            source.write(self._root / variant, **({"variant": variant} if source is tiny else {"kind": variant}))
            self._unchanged[variant] = self._computed(variant)
        expected = self._unchanged[variant]
        found = self._computed(variant, description, weights)
        return float((found - expected).abs().max() / expected.abs().max())

    def _computed(self, variant: str, description: Description = None, weights: Weights = None) -> Tensor:
        folder = self._root / variant
        config = read_hf_config(folder)
        model = model_of(config)
        described = model.description if description is None else description(model.description)
        [chunk] = build(model.family, described, self._parallel)
        load_hf_weights([chunk], model.family, config, folder, self._parallel)
        if weights is not None:
            weights(chunk)
        if described.vision is None:
            return logits(chunk, tiny.tokens())
        batch = seeing.batch(folder)
        with torch.no_grad(), device.megatron():
            inputs = pack(range(len(batch)), batch, torch.device("cpu")).model_inputs()
            own: Tensor = chunk.eval()(**inputs)
        return own


@pytest.fixture(scope="module")
def felt(tmp_path_factory: pytest.TempPathFactory, parallel: ParallelGroups) -> Felt:
    return Felt(tmp_path_factory.mktemp("felt"), parallel)


@pytest.mark.parametrize(("variant", "part", "name", "value"), DESCRIBED)
def test_a_field_that_is_a_little_off_is_felt(felt: Felt, variant: str, part: str, name: str, value: Any) -> None:
    def change(description: ModelDescription) -> ModelDescription:
        if part == ROPE:
            return replace(description, rope=replace(description.rope, **{name: value}))
        settings = {**getattr(description, part)}
        assert settings[name] != value
        return replace(description, **{part: {**settings, name: value}})

    assert felt.off(variant, change) > FELT


@pytest.mark.parametrize(("variant", "name", "factor"), WEIGHTS)
def test_a_weight_that_is_left_out_or_has_the_other_sign_is_felt(
    felt: Felt, variant: str, name: str, factor: float
) -> None:
    def change(chunk: nn.Module) -> None:
        named = [*chunk.named_parameters(), *chunk.named_buffers()]
        found = [weight.data for at, weight in named if at.endswith(name)]
        assert found
        for weight in found:
            weight.fill_(factor) if factor == NONE else weight.mul_(factor)

    assert felt.off(variant, weights=change) > FELT


def test_the_sign_of_attentions_gates_is_felt(felt: Felt) -> None:
    """Of a group of two heads of 16 numbers: two queries, their two gates, key and value."""

    def change(chunk: nn.Module) -> None:
        for name, weight in chunk.named_parameters():
            if name.endswith("linear_qkv.weight"):
                weight.data.view(2, 6 * 16, -1)[:, 2 * 16 : 4 * 16] *= -1

    assert felt.off("qwen3_5", weights=change) > FELT


def test_the_activation_of_the_gated_delta_convolution_is_felt(felt: Felt, monkeypatch: pytest.MonkeyPatch) -> None:
    assert felt.off("qwen3_5") == 0.0
    plain = SimpleNamespace(silu=lambda x: x, conv1d=F.conv1d, pad=F.pad)
    monkeypatch.setattr(gated_delta_layers, "F", plain)
    assert felt.off("qwen3_5") > FELT


@pytest.mark.parametrize("sections", SECTIONS)
def test_the_axis_that_a_pair_turns_by_is_felt(felt: Felt, sections: tuple[int, int, int]) -> None:
    def change(description: ModelDescription) -> ModelDescription:
        assert description.vision is not None
        return replace(description, vision=replace(description.vision, sections=interleaved(sections)))

    assert felt.off("qwen3_vl", change, source=seeing) > FELT
