"""Adapters beside Transformer Engine's layers, some with the norm fused in, learn what they learn beside the plain ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.actor import processes as plain
from tests.actor.layouts import distance
from tests.actor.lora import Layout, make, run
from tests.te.processes import spawn

TOLERANCE = 1e-5  # relative, fp32
ALONE = [Layout("dense"), Layout("experts", variant="qwen3_moe", experts=True)]
TWO = [
    Layout("dense, TP 2 sequence", tensor=2, sequence=True),
    Layout("experts, EP 2", variant="qwen3_moe", experts=True, expert=2),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lora")
    (root / "te").mkdir()
    for layout in ALONE:
        make(root, layout)
        (root / "te" / layout.model).symlink_to(root / layout.model)
    plain.spawn(run, 1, str(root), ALONE)
    spawn(run, 1, str(root / "te"), ALONE)
    spawn(run, 2, str(root / "te"), TWO)
    return root


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ALONE + TWO, ids=lambda layout: layout.name)
def test_what_adapters_learn(root: Path, layout: Layout) -> None:
    own = torch.load(root / "te" / layout.name / "result.pt", weights_only=True)
    want = torch.load(root / layout.name.split(",")[0] / "result.pt", weights_only=True)
    begin = load_file(root / layout.model / "begin" / "adapter_model.safetensors")
    assert own["adapters"].keys() == want["adapters"].keys() == begin.keys()
    for name, value in want["adapters"].items():
        assert distance(own["adapters"][name] - begin[name], value - begin[name]) < TOLERANCE, name
    for name, value in want["merged"].items():
        assert distance(own["merged"][name], value) < TOLERANCE, name
    for row, scores in want["reference"].items():
        torch.testing.assert_close(own["reference"][row], scores, rtol=1e-5, atol=1e-4)
