"""The pages of docs/algorithms: complete, and every example runs."""

from __future__ import annotations

import inspect
import re
import subprocess
from pathlib import Path
from typing import Annotated

import pytest
import torch
import yaml
from pydantic import Field

from megatron_rl.algorithms import (
    RewardTable,
    RolloutTokens,
    make_advantage_estimator,
    make_algorithm,
    make_surrogate,
)
from megatron_rl.base.typed_params import check_types
from megatron_rl.config import load_recipe
from megatron_rl.config.presets import PRESETS
from megatron_rl.launch.job_plan import read_sweep, sweep
from megatron_rl.methods import ESTIMATOR, SURROGATE, catalogue, get_method, list_methods

DOCS = Path(__file__).parents[2] / "docs" / "algorithms"
PAGES = sorted(DOCS.glob("*.md"))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.fixture
def _own_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "CATALOGUE", dict(catalogue.CATALOGUE))


@pytest.mark.parametrize("kind", [ESTIMATOR, SURROGATE])
def test_every_method_has_a_page_that_names_its_parameters(kind: str) -> None:
    for name in list_methods(kind):
        if not get_method(kind, name).function.__module__.startswith("megatron_rl."):
            continue  # a plug-in that another test has loaded
        page = (DOCS / f"{name}.md").read_text()
        links = re.findall(
            r"https://arxiv\.org/abs/\d{4}\.\d{5}",
            inspect.getdoc(inspect.getmodule(get_method(kind, name).function)) or "",
        )
        assert links or name == "none"
        assert all(link in page for link in links), f"{name}.md does not link its paper"
        assert page.startswith(f"# {name}\n")
        assert "Watch" in page
        assert "```yaml" in page
        for parameter in get_method(kind, name).defaults:
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
    estimator, tokens, weight = blocks(page, "python")
    assert len([line for line in estimator.splitlines() if line and not line.startswith("#")]) <= 10
    assert len([line for line in tokens.splitlines() if line and not line.startswith("#")]) <= 10
    (tmp_path / "my_methods.py").write_text("\n".join((estimator, tokens, weight)))
    monkeypatch.chdir(tmp_path)
    (recipe,) = blocks(page, "yaml")
    algorithm = make_algorithm(yaml.safe_load(recipe)["algorithm"])
    valid = torch.tensor([[True, True, True], [True, True, False]])
    table = RewardTable(torch.tensor([[[0.0], [1.0], [5.0]], [[1.0], [3.0], [9.0]]]), ("r",), valid)
    assert algorithm.compute_advantages(table).advantages.tolist() == [[-0.5, 0.0, 2.0], [0.0, 1.0, 0.0]]
    with pytest.raises(ValueError, match="did you mean 'scale'"):
        make_advantage_estimator("median_baseline", scael=1.0)
    decayed = make_advantage_estimator("decayed", decay=0.5)
    values = torch.tensor([[1.0, 5.0], [0.0, 5.0], [2.0, 5.0]])
    rollout = RolloutTokens(4.0, values, torch.tensor([0.5, 0.0]), ("teacher", "other"))
    assert decayed.token_advantages(rollout).tolist() == [1.5, 2.0, 5.0]
    gate = make_surrogate("sigmoid_gate")
    values = gate(torch.tensor([0.0, 1.0, -1.0, 1e3]), torch.tensor([1.0, 1.0, 1.0, 1.0]))
    assert float(values[0]) == 1.0
    assert torch.isfinite(values).all()
    assert values[1] < torch.tensor(1.0).exp()


@pytest.mark.usefixtures("_own_methods")
def test_the_tutorial_compares_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = DOCS / "adding-an-estimator.md"
    monkeypatch.chdir(tmp_path)
    Path("my_methods.py").write_text("\n".join(blocks(page, "python")))
    (recipe,) = blocks(page, "yaml")
    Path("mine.yaml").write_text(recipe)
    commands = "".join(blocks(page, "bash"))
    written = re.findall(r"^(?:printf|for) .*", commands, re.MULTILINE)
    subprocess.run(["bash", "-euc", "\n".join(written)], check=True)
    names = ["dr_grpo", "median_baseline"]
    assert read_sweep(Path("mine.sweep")) == [f"algorithm.estimator.name={name}" for name in names]
    tasks = sweep("mine.yaml", read_sweep(Path("mine.sweep")), [], None, tmp_path)
    found = [load_recipe("mine.yaml", list(task.arguments[2:])).algorithm.estimator for task in tasks]
    assert [(one.name, one.params) for one in found] == [(names[0], {}), (names[1], {"scale": 0.5})]
    (large,) = re.findall(r"seeds.sweep ([\w/-]+\.yaml) '(.*)'", commands)
    lines = read_sweep(Path("seeds.sweep"))
    assert lines[-1] == "algorithm.estimator.name=median_baseline seed=2"
    assert load_recipe(large[0], [large[1], *lines[-1].split()]).algorithm.estimator.name == names[1]


@pytest.mark.parametrize("page", ["algorithms/adding-an-estimator.md", "rewards/your-own.md"])
def test_bounds_as_the_pages_write_them(page: str) -> None:
    (annotation,) = re.findall(r"`(Annotated\[.*?\])`", (DOCS.parent / page).read_text())

    def method(*, scale=1.0): ...

    method.__annotations__["scale"] = eval(annotation, {"Annotated": Annotated, "Field": Field})
    with pytest.raises(ValueError, match="`scale` must be at least"):
        check_types(method, {"scale": -1})
