"""A quantised folder is read as `transformers` reads it, and written in bf16; for the tests of this folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_rl.models import family_for, read_hf_config
from megatron_rl.weights.export import export_hf
from megatron_rl.weights.load_hf import load_hf_weights
from megatron_rl.weights.parallel import ParallelGroups

from .megatron import build


def check_is_read_as_by_transformers(folder: Path, export: Path, parallel: ParallelGroups) -> None:
    """Loads a folder, exports what was loaded, and compares every tensor with transformers', bit for bit."""
    config = read_hf_config(folder)
    family = family_for(config)
    chunks = build(family, family.describe(config), parallel)
    load_hf_weights([chunk.to(torch.bfloat16) for chunk in chunks], family, config, folder, parallel)
    export_hf(export, chunks, family, config, parallel, folder)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    found = load_file(export / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name], value), name
    assert "quantization_config" not in json.loads((export / "config.json").read_text())
