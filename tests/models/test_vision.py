"""Qwen2.5-VL and Qwen3-VL in one process against `transformers`. Layouts of it are in tests/actor/test_layouts.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_rl.actor.packing import pack
from megatron_rl.models import Model, family_for, read_hf_config
from megatron_rl.runtime import device
from megatron_rl.weights.files import SafetensorsFolder
from megatron_rl.weights.gather import iter_hf_weights
from megatron_rl.weights.load_hf import load_hf_weights
from megatron_rl.weights.parallel import ParallelGroups
from megatron_rl.weights.stacked import opened, stacked

from . import seeing
from .megatron import build


@pytest.fixture(scope="module", params=seeing.KINDS)
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return seeing.write(tmp_path_factory.mktemp("seeing") / "model", kind=request.param)


def test_log_probs_and_gradients_are_those_of_transformers(folder: Path, parallel: ParallelGroups) -> None:
    batch, config = seeing.batch(folder), read_hf_config(folder)
    family = family_for(config)
    chunks = build(family, family.describe(config), parallel)
    load_hf_weights(chunks, family, config, folder, parallel)
    micro = pack(range(len(batch)), batch, torch.device("cpu"))
    assert micro.images is not None
    assert len(micro.images.prompts) == 2  # of three sequences with images two share a prompt
    with device.megatron():
        logits = chunks[0](**micro.model_inputs())[0].log_softmax(-1)
        log_probs = logits[micro.predictors, micro.targets]
        log_probs.sum().backward()
    expected, gradients = seeing.expected(folder, batch, gradients=True)
    torch.testing.assert_close(log_probs.detach(), torch.cat(expected), rtol=1e-5, atol=1e-5)
    for parameter in chunks[0].parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    count = Model(family, family.describe(config)).expert_count
    for name, own in stacked(iter_hf_weights(chunks, family, config, parallel), family.stacking, count):
        if not name.startswith(("model.visual", "model.language_model", "lm_head")):  # as files of Qwen2.5-VL have it
            name = f"model.{name}" if name.startswith("visual") else name.replace("model.", "model.language_model.", 1)
        wanted = gradients[name]
        own = own.transpose(1, 2) if ".experts." in name else own
        assert (own - wanted).norm() <= 1e-5 * wanted.norm(), name


def test_experts_are_read_in_both_ways_that_they_are_stored(tmp_path: Path) -> None:
    """Reads them as they are published, which transformers reads too, and as transformers 5.19 saves them."""
    folder = seeing.write(tmp_path / "model", kind="qwen3_vl_moe")
    family = family_for(read_hf_config(folder))
    name = "model.language_model.layers.1.mlp.experts.2.{}_proj.weight"
    read = []
    for _ in range(2):
        source = opened(SafetensorsFolder(folder), family)
        read.append([source.read(name.format(part), 0, 0, 8) for part in ("gate", "up", "down")])
        seeing.transpose_experts(folder)
    assert all(torch.equal(one, other) for one, other in zip(*read, strict=True))
