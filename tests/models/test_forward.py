"""The Megatron model filled through a family's map computes what `transformers` computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_rl.config.schema import CreateModelConfig
from megatron_rl.models import ParallelGroups, create_model, family_for, load_hf_weights, read_hf_config
from tests.models.megatron import build, start, stop


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ParallelGroups]:
    yield start(0, 1, str(tmp_path_factory.mktemp("rendezvous") / "file"))
    stop()


def megatron_logits(folder: Path, tokens: torch.Tensor, parallel: ParallelGroups) -> torch.Tensor:
    """[batch, tokens, vocabulary]"""
    from megatron_rl.runtime.cpu_megatron import MegatronOnCpu

    config = read_hf_config(folder)
    family = family_for(config)
    description = family.describe(config)
    (model,) = build(description, parallel)
    load_hf_weights([model], family, config, folder, parallel)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    future = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad(), MegatronOnCpu():
        return model(tokens, positions, future)


def hf_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_created_model(tmp_path: Path, parallel: ParallelGroups, tied: bool) -> None:
    create_model(tmp_path / "m", CreateModelConfig(tie_embeddings=tied, vocab_size=61, init_std=0.08), seed=1)
    tokens = torch.randint(61, (2, 50), generator=torch.Generator().manual_seed(0))
    expected = hf_logits(tmp_path / "m", tokens)
    torch.testing.assert_close(megatron_logits(tmp_path / "m", tokens, parallel), expected, rtol=1e-5, atol=1e-5)
