"""The Megatron model filled through a family's map computes what `transformers` computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_rl.config.model import CreateModelConfig
from megatron_rl.models import family_for, read_hf_config
from megatron_rl.weights.create import create_model
from megatron_rl.weights.export import export_hf
from megatron_rl.weights.load_hf import load_hf_weights
from megatron_rl.weights.parallel import ParallelGroups

from . import tiny
from .megatron import build, logits


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_logits_are_those_of_transformers(tmp_path: Path, parallel: ParallelGroups, variant: str) -> None:
    folder = tiny.write(tmp_path / "model", variant)
    config = read_hf_config(folder)
    family = family_for(config)
    chunks = build(family, family.describe(config), parallel)
    load_hf_weights(chunks, family, config, folder, parallel)
    expected = tiny.hf_logits(folder)
    torch.testing.assert_close(logits(chunks[0], tiny.tokens()), expected, rtol=1e-5, atol=1e-5 * expected.abs().max())


def test_export_of_a_created_model_generates_the_same(tmp_path: Path, parallel: ParallelGroups) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, export = tmp_path / "model", tmp_path / "export"
    create_model(source, CreateModelConfig(init_std=0.08), seed=1)
    config = read_hf_config(source)
    family = family_for(config)
    chunks = build(family, family.describe(config), parallel)
    load_hf_weights(chunks, family, config, source, parallel)
    export_hf(export, chunks, family, config, parallel, source)
    prompt = "1+3-5="
    texts = []
    for folder in (source, export):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        inputs = tokenizer(prompt, return_tensors="pt")
        texts.append(tokenizer.decode(model.generate(**inputs, max_new_tokens=12, do_sample=False)[0]))
    assert texts[0] == texts[1]
    assert texts[0].startswith(prompt)
    assert not list(tmp_path.glob(".*"))
