"""What docs/reproduced says of the papers' claims is what the code computes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from reproduced import awpo, dgpo, gdpo, shrinkage
from reproduced.page import PAGES, make_page, markdown_table

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "reproduced"


@pytest.mark.parametrize("name", PAGES)
def test_the_page_of_claims_shows_every_figure(name: str) -> None:
    assert 0 < (FOLDER / f"{name}.png").stat().st_size < 150_000
    if name != "shrinkage":  # half a minute; tested by its parts below
        assert (FOLDER / f"{name}.md").read_text() == make_page(name).text(name)
    assert f"({name}.png)" in (FOLDER / "README.md").read_text()


def test_gdpo_facts() -> None:
    """Fig. 2: two distinct groups with GRPO, three with GDPO; Fig. 3: the counts on the authors' plot."""
    rows = gdpo.figure_2()
    assert [len({row[column] for row in rows}) for column in (1, 3)] == [2, 3]
    assert "are those read off the paper's plot" in "".join(make_page("gdpo").blocks)


def test_dgpo_order_holds_where_the_page_says() -> None:
    assert dgpo.holds_from([("dgpo", 1), ("cispo", 1), ("ce", 1), ("grpo", 1)]) == {
        "dgpo < cispo": 0.0,
        "cispo < ce": 5.0,
        "ce < grpo": 0.0,
    }
    assert dgpo.holds_from([("grpo", 1), ("dgpo", 1)]) == {"grpo < dgpo": None}
    assert dgpo.mean_bias("GRPO", "LN") == pytest.approx((0.8 + 0.05) / 2)
    assert dgpo.mean_bias("DGPO", "LP") < 1e-12


def test_awpo_gate_is_about_spread() -> None:
    opened = {
        label: float(awpo.gate(*awpo.sample(each, 3), 0.55)[0].double().mean()) for label, each in awpo.JUDGES.items()
    }
    assert opened["agrees"] < 0.1 < 0.5 < opened["knows nothing"] < opened["contradicts"]


def test_the_simulation_agrees_with_theory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores have mean 0, RLOO has the error theory gives it, and shrinkage is better; its lambda is below the optimum."""
    bandit = shrinkage.make_bandit(1.5, prompts=6)
    expected = (bandit.probabilities[:, :, None] * bandit.scores).sum(1)
    assert expected.abs().max() < 1e-12  # scores have mean 0
    monkeypatch.setattr(shrinkage, "BATCHES", 200)
    baselines = {label: shrinkage.by_name(*each) for label, each in shrinkage.BASELINES.items()}
    result = shrinkage.simulate(shrinkage.make_bandit(1.5), 4, baselines)
    assert result.mse["shrinkage"] < 0.75 * result.mse["RLOO"]
    assert result.response["shrinkage"] < 0.95 * result.response["RLOO"]
    values = shrinkage.make_bandit(1.5).values
    assert result.mse["RLOO"] == pytest.approx(float((values * (1 - values)).mean() / 3), rel=0.1)
    assert 0 < result.shrinkage < shrinkage.oracle(shrinkage.make_bandit(1.5), 4)


def test_fixed_lambda_goes_from_rloo_to_bloo() -> None:
    torch.manual_seed(0)
    table = shrinkage.RewardTable(torch.rand(4, 3, 1).double(), ("r",))
    for value, name in ((0.0, "rloo"), (1.0, "bloo")):
        torch.testing.assert_close(shrinkage.fixed(value)(table), shrinkage.by_name(name, {})(table))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("reproduce_tool", ROOT / "tools" / "reproduce.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.main(["gdpo", "--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"gdpo.md", "gdpo.png"}
    with pytest.raises(SystemExit):
        tool.main(["nothing"])


def test_tables() -> None:
    assert markdown_table(("a", "b"), [["x", 0.5], ["y", 2]]) == "| a | b |\n|---|---:|\n| x | 0.500 |\n| y | 2 |"
