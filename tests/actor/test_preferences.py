"""Reward models: loss and gradients are those of transformers in float64, and no layout changes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import tiny
from tests.tolerance import RELATIVE, differing

from .layouts import Layout, distance
from .preferences import CENTERING, EPS, RATE, make_pairs, run_layouts
from .processes import spawn

ALONE = [Layout("alone"), Layout("alone tied", tied=True), Layout("alone experts", experts=True)]
TWO = [
    Layout("one micro-batch", tensor=2, tokens_per_microbatch=4096),
    Layout("TP 2", tensor=2),
    Layout("TP 2 sequence tied", tensor=2, sequence=True, tied=True),
    Layout("PP 2", pipeline=2),
    Layout("PP 2 tied", pipeline=2, tied=True),
    Layout("DP 2", distributed=True),
    Layout("DP 2 plain optimizer", distributed=False),
    Layout("CP 2", context=2),
    Layout("EP 2 experts", experts=True, expert=2),
    Layout("TP 2 sequence experts", tensor=2, sequence=True, experts=True),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preferences")
    for model, variant in (("model-False", "qwen3"), ("model-True", "llama3"), ("model-experts", "qwen3_moe")):
        (folder / model).mkdir()
        tiny.write(folder / model, variant)
    spawn(run_layouts, 1, str(folder), ALONE)
    spawn(run_layouts, 2, str(folder), TWO)
    return folder


def result(root: Path, name: str) -> Any:
    return torch.load(root / f"{name}.pt", weights_only=False)


@pytest.mark.parametrize("layout", ALONE[:2], ids=lambda layout: layout.name)  # the experts' kernel has no float64
def test_loss_and_gradients_are_those_of_transformers_in_float64(root: Path, layout: Layout) -> None:
    """The exported reward model is what it reads: it loads there, too."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(root / layout.model / "reward", dtype=torch.float64)
    assert model.config.num_labels == 1
    loss, right, pairs = torch.zeros((), dtype=torch.float64), 0, make_pairs()
    for pair in pairs:
        chosen, rejected = (
            model.score(model.model(torch.tensor([ids]))[0][:, -1])[0, 0] for ids in (pair.chosen, pair.rejected)
        )
        ratio = torch.exp(rejected + pair.margin) / (torch.exp(chosen) + torch.exp(rejected + pair.margin))
        loss = loss - torch.log(1 - ratio) + CENTERING * (chosen + rejected) ** 2
        right += int(chosen > rejected)
    (loss / len(pairs)).backward()
    found = result(root, layout.name)
    assert found["metrics"]["reward_model/loss"] == pytest.approx(loss.item() / len(pairs), rel=RELATIVE)
    assert found["metrics"]["reward_model/accuracy"] == right / len(pairs)
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        want = RATE * gradient / (gradient.abs() + EPS)
        assert distance(found["changes"][name], want) < 5 * RELATIVE, name


@pytest.mark.parametrize("layout", TWO, ids=lambda layout: layout.name)
def test_no_layout_changes_loss_or_gradients(root: Path, layout: Layout) -> None:
    want = result(root, "alone experts" if layout.experts else "alone tied" if layout.tied else "alone")
    found = result(root, layout.name)
    assert differing(found["metrics"], want["metrics"]) == []
    assert differing(found["held_out"], want["held_out"]) == []
    assert found["changes"].keys() == want["changes"].keys()
    for name, change in want["changes"].items():
        assert distance(found["changes"][name], change) < 5 * RELATIVE, name
