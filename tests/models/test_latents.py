"""Latent attention: packed sequences of odd lengths, and what is asked before an engine on a CPU begins."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_rl.config.model_checks import check_cpu_engine
from megatron_rl.config.schema import Config
from megatron_rl.models import family_for, read_hf_config
from megatron_rl.models.multi_latent import MultiLatent
from megatron_rl.runtime import device
from megatron_rl.weights.load_hf import load_hf_weights
from megatron_rl.weights.parallel import ParallelGroups

from . import tiny
from .megatron import build

LENGTHS = [7, 1, 33, 12]


def test_packed_sequences_of_odd_lengths_are_computed_as_one_by_one(tmp_path: Path, parallel: ParallelGroups) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny.write(tmp_path / "model", "deepseek_v3-yarn")
    config = read_hf_config(folder)
    family = family_for(config)
    [chunk] = build(family, family.describe(config), parallel)
    load_hf_weights([chunk], family, config, folder, parallel)
    sequences = tiny.tokens(1, sum(LENGTHS))[0].split(LENGTHS)
    offsets = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    packed = PackedSeqParams("thd", offsets, offsets, max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with torch.no_grad(), device.megatron():
        found = chunk.eval()(torch.cat(sequences)[None], positions, None, packed_seq_params=packed)[0].split(LENGTHS)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for own, sequence in zip(found, sequences, strict=True):
        with torch.no_grad():
            expected = theirs(sequence[None]).logits[0]
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_its_sizes() -> None:
    """DeepSeek-V3's, by hand."""
    attention = MultiLatent(heads=128, q_rank=1536, kv_rank=512, nope=128, rope=64, value=128)
    assert attention.cache_numbers(8) == 576
    assert attention.head_width == 192
    assert attention.products(7168, 8) == [(2112, 7168), (3072, 1536), (4096, 512), (7168, 2048)]
    [problem] = attention.problems(3, "actor.parallel.tensor")
    assert "`actor.parallel.tensor` (3): num_attention_heads" in problem


@pytest.mark.parametrize(
    ("variant", "changes", "said"),
    [
        ("deepseek_v3-yarn", {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, []),
        ("deepseek_v3-yarn", {}, [r"512 \+ 64 numbers, and the model's have 20 \+ 8: kv_lora_rank"]),
        ("deepseek_v3", {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, ["turns one head .* rope_parameters"]),
    ],
)
def test_an_engine_on_a_cpu_that_would_compute_otherwise_is_refused(
    tmp_path: Path, variant: str, changes: dict[str, Any], said: list[str]
) -> None:
    config = Config(run_dir=str(tmp_path))
    config.model.path = str(tiny.write(tmp_path / "model", variant, num_hidden_layers=2, **changes))
    problems = list(check_cpu_engine(config))
    assert len(problems) == len(said)
    for problem, pattern in zip(problems, said, strict=True):
        assert re.search(pattern, problem)
