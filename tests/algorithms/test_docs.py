"""The pages of docs/algorithms: complete, and every example runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron_rl.algorithms import RewardTable, make_advantage_estimator, make_algorithm, make_gradient_weight
from megatron_rl.algorithms.registry import _IMPLEMENTATIONS
from megatron_rl.config import methods
from megatron_rl.config.presets import PRESETS

DOCS = Path(__file__).parents[2] / "docs" / "algorithms"
PAGES = sorted(DOCS.glob("*.md"))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.fixture
def _own_methods() -> Any:
    catalogue = {kind: dict(entries) for kind, entries in methods._CATALOGUE.items()}
    implementations = dict(_IMPLEMENTATIONS)
    yield
    methods._CATALOGUE.update(catalogue)
    for kind in catalogue:
        methods._CATALOGUE[kind] = catalogue[kind]
    _IMPLEMENTATIONS.clear()
    _IMPLEMENTATIONS.update(implementations)


@pytest.mark.parametrize("kind", [methods.ESTIMATOR, methods.WEIGHT])
def test_every_method_has_a_page_that_names_its_parameters(kind: str) -> None:
    for name in methods.list_methods(kind):
        page = (DOCS / f"{name}.md").read_text()
        assert page.startswith(f"# {name}\n")
        assert "Watch" in page
        assert "```yaml" in page
        for parameter in methods.get_method(kind, name).params:
            assert f"`{parameter}`" in page, f"{name}.md does not mention {parameter}"
        assert f"({name}.md)" in (DOCS / "README.md").read_text()


def test_every_preset_is_in_the_table() -> None:
    page = (DOCS / "presets.md").read_text()
    for name in PRESETS:
        assert f"`{name}`" in page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_recipes(page: Path) -> None:
    for target in re.findall(r"\]\(([\w-]+\.md)\)", page.read_text()):
        assert (DOCS / target).is_file(), target
    if page.stem == "adding-an-estimator":
        return
    for block in blocks(page, "yaml"):
        make_algorithm(yaml.safe_load(block)["algorithm"], max_tokens=100)
    for inline in re.findall(r"`(\{preset:.*?\})`", page.read_text(), re.DOTALL):
        make_algorithm(yaml.safe_load(inline), max_tokens=100)


@pytest.mark.usefixtures("_own_methods")
def test_adding_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = DOCS / "adding-an-estimator.md"
    estimator, weight = blocks(page, "python")
    assert len([line for line in estimator.splitlines() if line and not line.startswith("#")]) <= 10
    (tmp_path / "my_methods.py").write_text(estimator + "\n" + weight)
    monkeypatch.chdir(tmp_path)
    (recipe,) = blocks(page, "yaml")
    algorithm = make_algorithm(yaml.safe_load(recipe)["algorithm"])
    valid = torch.tensor([[True, True, True], [True, True, False]])
    table = RewardTable(torch.tensor([[[0.0], [1.0], [5.0]], [[1.0], [3.0], [9.0]]]), ("r",), valid)
    assert algorithm.estimate(table).advantages.tolist() == [[-0.5, 0.0, 2.0], [0.0, 1.0, 0.0]]
    with pytest.raises(ValueError, match="did you mean 'scale'"):
        make_advantage_estimator("median_baseline", scael=1.0)
    gate = make_gradient_weight("sigmoid_gate")
    values = gate(torch.tensor([0.0, 1.0, -1.0, 1e3]), torch.tensor([1.0, 1.0, 1.0, 1.0]))
    assert float(values[0]) == 1.0
    assert torch.isfinite(values).all()
    assert values[1] < torch.tensor(1.0).exp()
