"""With Transformer Engine's layers and its Adam a model learns what it learns with the plain ones and torch's AdamW.

As `tests.actor.test_layouts`, which see for the optimizer: two updates on one batch, and the change of every weight compared.
In fp32 attention is Transformer Engine's unfused one; in bf16 it is its fused one, computed by a stand-in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.weights.files import SafetensorsFolder
from tests.actor import processes as plain
from tests.actor.layouts import Layout, distance, make_models, run_layouts
from tests.te import inside
from tests.te.processes import spawn
from tests.tolerance import RELATIVE, differing

BF16 = "bfloat16"
# bf16, relative (measured: 0.09 and 0.17, of the largest ratio): each way rounds at other places, and an update's change of a
# weight is the difference of rounded weights.
CHANGE, METRIC = 0.15, 0.3
ALONE = [Layout("dense"), Layout("tied", tied=True), Layout("experts", experts=True)]
ALONE += [Layout("experts replayed", experts=True, replay=True)]
ALONE += [Layout("dense bf16", dtype=BF16), Layout("experts bf16", experts=True, dtype=BF16)]
TWO = [
    Layout("dense, TP 2 sequence", tensor=2, sequence=True),
    Layout("tied, TP 2 sequence", tensor=2, sequence=True, tied=True),
    Layout("tied, PP 2", pipeline=2, tied=True),
    Layout("dense, DP 2"),
    Layout("experts, EP 2", experts=True, expert=2),
    Layout("experts, TP 2 sequence EP 2", experts=True, tensor=2, sequence=True, expert=2),
    Layout("experts, TP 2 sequence, whole", experts=True, tensor=2, sequence=True),
    Layout("experts, PP 2", experts=True, pipeline=2),
    Layout("tied, DP 2 overlap", tied=True, actor={"overlap": True}),
    Layout(
        "experts, EP 2 overlap, norm and activation again",
        experts=True,
        expert=2,
        actor={"overlap": True, "recompute": "selective", "recompute_modules": ["layernorm", "moe_act"]},
    ),
    Layout("experts replayed, EP 2 recompute", experts=True, expert=2, replay=True, actor={"recompute": "full"}),
    Layout("dense bf16, TP 2 sequence", tensor=2, sequence=True, dtype=BF16),
    Layout("experts bf16, EP 2", experts=True, expert=2, dtype=BF16),
    Layout("dense bf16, CP 2", context=2, dtype=BF16),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the plain layers' results lie, and under `te` those of Transformer Engine's."""
    root = tmp_path_factory.mktemp("layers")
    (root / "te").mkdir()
    make_models(root)
    for model in root.glob("model-*"):
        (root / "te" / model.name).symlink_to(model)
    plain.spawn(run_layouts, 1, str(root), ALONE)
    spawn(run_layouts, 1, str(root / "te"), ALONE)
    spawn(run_layouts, 2, str(root / "te"), TWO)
    return root


def _load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)["seq-mean-token-mean"]


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ALONE + TWO, ids=lambda layout: layout.name)
def test_what_it_learns(root: Path, layout: Layout) -> None:
    own, want = _load(root / "te" / f"{layout.name}.pt"), _load(root / f"{layout.name.split(',')[0]}.pt")
    files = SafetensorsFolder(root / layout.model)
    half = layout.dtype == BF16
    assert own["metrics"].keys() == want["metrics"].keys()
    assert own["weights"].keys() == want["weights"].keys() == set(files.names())
    if half:
        gaps = {
            name: abs(own["metrics"][name] - value) / max(abs(value), 0.1) for name, value in want["metrics"].items()
        }
        assert max(gaps.values()) < METRIC, max(gaps.items(), key=lambda gap: gap[1])
    else:
        assert differing(own["metrics"], want["metrics"]) == []
    moved: dict[str, float] = {}
    for name, weight in want["weights"].items():
        start = files.read(name, 0, 0, files.shape(name)[0]).to(weight.dtype)
        moved[name] = distance(own["weights"][name] - start, weight - start)
    assert max(moved.values()) < (CHANGE if half else RELATIVE), max(moved.items(), key=lambda gap: gap[1])


def test_plan_counts_what_these_layers_keep() -> None:
    spawn(inside.kept_activations, 1)
