"""Experts that files have stacked, and in MXFP4: what is read and written is what `transformers` reads and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_rl.checkpoint.convert import jobs
from megatron_rl.checkpoint.convert.layout import Layout
from megatron_rl.checkpoint.convert.to_hf import ToHF
from megatron_rl.checkpoint.convert.to_megatron import ToMegatron
from megatron_rl.checkpoint.convert.verify import compare
from megatron_rl.models import family_for, read_hf_config
from megatron_rl.models.expert_stacks import Stacking
from megatron_rl.weights.files import SafetensorsFolder, as_tensor
from megatron_rl.weights.load_hf import load_hf_weights
from megatron_rl.weights.parallel import ParallelGroups
from megatron_rl.weights.stacked import Unstacked, dequantised

from . import tiny
from .megatron import build
from .read_in_bf16 import check_is_read_as_by_transformers

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}


def in_mxfp4(folder: Path) -> Path:
    """A tiny GPT-OSS as the published ones are: experts' matrices in MXFP4, all else in bf16."""
    tiny.write(folder, "gpt_oss", num_hidden_layers=2, intermediate_size=64, dtype="bfloat16")
    generator = torch.Generator().manual_seed(1)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj") and "experts" in name]:
        experts, inputs, outputs = weights.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        weights[name + "_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        weights[name + "_scales"] = torch.randint(118, 126, shape, dtype=torch.uint8, generator=generator)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": MXFP4}))
    return folder


def test_every_byte_of_mxfp4_with_every_scale_is_what_transformers_makes_of_it() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 256, 16, 16).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).expand(1, 256, 16).contiguous()
    expected = convert_moe_packed_tensors(blocks, scales)[0].T
    found = as_tensor(dequantised(blocks[0].numpy(), scales[0].numpy()), "BF16")
    assert torch.equal(found.view(torch.int16), expected.contiguous().view(torch.int16))


def test_an_mxfp4_checkpoint_is_read_as_transformers_reads_it_and_written_in_bf16(
    tmp_path: Path, parallel: ParallelGroups
) -> None:
    folder, export = in_mxfp4(tmp_path / "mxfp4"), tmp_path / "export"
    check_is_read_as_by_transformers(folder, export, parallel)


@pytest.mark.parametrize("ending", ["_blocks", "_scales"])
def test_blocks_and_scales_that_do_not_go_together_are_refused(tmp_path: Path, ending: str) -> None:
    folder = in_mxfp4(tmp_path / "mxfp4")
    weights = load_file(folder / "model.safetensors")
    name = f"model.layers.1.mlp.experts.down_proj{ending}"
    weights[name] = weights[name][:, :-1].contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.down_proj_blocks in .* MXFP4 has"):
        Unstacked(SafetensorsFolder(folder), Stacking(transposed=True, interleaved=True))


def test_a_stacked_tensor_of_other_sizes_is_refused(tmp_path: Path, parallel: ParallelGroups) -> None:
    folder = tiny.write(tmp_path / "model", "gpt_oss", num_hidden_layers=1)
    weights = load_file(folder / "model.safetensors")
    config = read_hf_config(folder)
    family = family_for(config)
    chunks = build(family, family.describe(config), parallel)
    for name, cut, problem in (
        ("gate_up_proj", lambda x: x[..., :-1], "gate_up_proj in .* no equal halves"),
        ("gate_up_proj", lambda x: x[..., :-2], "gate_proj.weight in .* has shape .* but config.json makes it"),
        ("gate_up_proj", lambda x: x[0], "gate_up_proj in .* expected 3 sizes"),
        ("down_proj_bias", lambda x: x[:, :-1], "down_proj.bias in .* has shape"),
        ("down_proj", lambda x: x[:-1], "lacks model.layers.0.mlp.experts.7.down_proj.weight"),
    ):
        changed = {**weights, f"model.layers.0.mlp.experts.{name}": cut(weights[f"model.layers.0.mlp.experts.{name}"])}
        save_file({key: value.contiguous() for key, value in changed.items()}, folder / "model.safetensors")
        with pytest.raises(ValueError, match=problem):
            load_hf_weights(chunks, family, config, folder, parallel)


def test_an_mxfp4_checkpoint_is_converted_as_transformers_reads_it(tmp_path: Path) -> None:
    folder = in_mxfp4(tmp_path / "mxfp4")
    there, back = ToMegatron(folder, Layout(2, 2, 4)), tmp_path / "back"
    jobs.run(there, tmp_path / "megatron", 1, lambda _: None)
    jobs.run(ToHF(tmp_path / "megatron", tmp_path / "megatron"), back, 1, lambda _: None)
    expected, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict(), {}
    for file in back.glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert "quantization_config" not in json.loads((back / "config.json").read_text())
    assert len(compare(there, tmp_path / "megatron", 1)) == len(there.names())
