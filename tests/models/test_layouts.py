"""Loading into Megatron in several processes: every rank reads back the file's bits, and computes what one would.

Each test starts its processes once and goes through several layouts, because starting them is what takes the time.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from . import tiny
from .layouts import Layout, check
from .megatron import spawn


@pytest.mark.ranks
@pytest.mark.parametrize(
    "layouts",
    [
        [
            Layout("qwen3", tensor=2),
            Layout("qwen2-tied", pipeline=2, virtual=2),
            Layout("qwen3_moe", expert=2),
            Layout("qwen3_moe", tensor=2),
            Layout("qwen3_moe", tensor=2, expert=2),
            Layout("qwen3_moe", expert_tensor=2),
            Layout("deepseek_v3", tensor=2, expert=2),
            Layout("glm4_moe", expert=2),
            Layout("gpt_oss", tensor=2, expert=2),
            Layout("gpt_oss", pipeline=2),
            Layout("qwen3_5", tensor=2),
            Layout("qwen3_5-tied", pipeline=2),
            Layout("qwen3_5_moe", tensor=2, expert=2),
        ],
        [
            Layout("qwen2-tied", 2, 2),
            Layout("llama", tensor=4),
            Layout("qwen3_moe", pipeline=2, expert=2),
            Layout("deepseek_v3-yarn", tensor=2, pipeline=2, expert=2),
            Layout("glm4_moe-norms", tensor=2, pipeline=2),
            Layout("qwen3_moe", tensor=2, expert=4),
            Layout("qwen3_moe", tensor=2, expert=2),
            Layout("qwen3_moe", tensor=2, expert=2, expert_tensor=2),
        ],
    ],
    ids=["2 processes", "4 processes"],
)
def test_every_rank_reads_back_the_file(tmp_path: Path, layouts: list[Layout]) -> None:
    for variant in {layout.variant for layout in layouts}:
        torch.save(tiny.hf_logits(tiny.write(tmp_path / variant, variant)), tmp_path / variant / "logits.pt")
    first = layouts[0]
    spawn(check, first.tensor * first.pipeline, tmp_path, str(tmp_path), layouts)
