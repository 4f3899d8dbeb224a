"""Every family with Transformer Engine's modules: ranks read back the file's bits, and compute what `transformers` does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models import tiny
from tests.models.layouts import Layout
from tests.te import inside
from tests.te.processes import spawn

TWO = [
    Layout("qwen3", tensor=2),
    Layout("qwen2-tied", pipeline=2, virtual=2),
    Layout("qwen3_moe", tensor=2, expert=2),
    Layout("qwen3_moe", expert_tensor=2),
]


@pytest.mark.ranks
@pytest.mark.parametrize("layouts", [[Layout(variant) for variant in tiny.VARIANTS], TWO], ids=["alone", "2 processes"])
def test_loading_computing_exporting(tmp_path: Path, layouts: list[Layout]) -> None:
    for variant in {layout.variant for layout in layouts}:
        torch.save(tiny.hf_logits(tiny.write(tmp_path / variant, variant)), tmp_path / variant / "logits.pt")
    spawn(inside.load_and_export, layouts[0].tensor, str(tmp_path), layouts)
