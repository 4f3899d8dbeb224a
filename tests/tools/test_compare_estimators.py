"""Comparing estimators on a recorded step: numbers that can be worked out by hand, and the command."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from megatron_rl.algorithms import RewardTable, list_advantage_estimators, list_surrogates, make_algorithm
from megatron_rl.cli import main
from megatron_rl.comparison import summaries as tool
from megatron_rl.methods import ESTIMATOR
from megatron_rl.methods.catalogue import CATALOGUE
from megatron_rl.trainer.record import TokenLog, write_step, write_tokens


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that recorded step 7: 4 prompts, 4 rollouts, two rewards, ratios on both sides of the bounds."""
    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.integers(0, 2, (4, 4, 2)).astype(float))
    values[0] = 1.0
    lengths = torch.from_numpy(rng.integers(1, 6, (4, 4)))
    table = RewardTable(values, ("right", "format"), lengths=lengths)
    estimate = make_algorithm("grpo").compute_advantages(table)
    log = TokenLog()
    for row, size in enumerate(lengths.flatten().tolist()):
        old = rng.normal(-1, 0.1, size).astype(np.float32)
        new = old + rng.normal(0, 0.4, size).astype(np.float32)
        log.rows[row] = {"log_probs": new, "old_log_probs": old, "rollout_log_probs": old, "gradient_weights": old}
    path = tmp_path / "rollouts" / "step_7.npz"
    write_tokens(path, 0, np.arange(16), log)
    write_step(path, list("abcd"), table, torch.zeros(4, 4, dtype=torch.bool), estimate, parts=1)
    return tmp_path


def test_noise_does_not_depend_on_scale_and_knows_a_better_baseline() -> None:
    rewards = torch.tensor([[0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]]).double()[:, :, None]
    table = RewardTable(rewards, ("r",), lengths=torch.full((2, 4), 3.0))
    summaries, left_out = tool.compare_estimators(table, list_advantage_estimators())
    assert set(left_out) == {"awpo", "remax"}
    rloo, centred = summaries["rloo"], summaries["dr_grpo"]
    assert rloo.noise is not None
    assert centred.noise == pytest.approx(rloo.noise)
    assert rloo.spread == pytest.approx(centred.spread * 4 / 3)
    # RLOO: A = (r - 3/4) 4/3 and its negative mirror: mean A^2 = 1/3; the covariance with r is 1/3.
    assert rloo.noise == pytest.approx(3.0 * (1 / 3) / (1 / 3) ** 2)
    useless = tool.summarize_advantages(table, torch.full((2, 4), 0.5))
    assert useless.noise is None
    shifted = tool.summarize_advantages(table, centred.advantages + 1.0)
    assert shifted.noise is not None
    assert shifted.noise > rloo.noise


@pytest.mark.parametrize("name", ["gdpo", "reinforce_pp_baseline"])
def test_a_group_without_signal_is_silent(name: str) -> None:
    """Batch statistics move it by their rounding at most, which is no advantage."""
    rewards = torch.rand(7, 5, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rewards[3] = 0.1
    summaries, _ = tool.compare_estimators(RewardTable(rewards, ("r",)), [name])
    assert summaries[name].silent == pytest.approx(1 / 7)


def test_weights_by_hand() -> None:
    ratio = torch.tensor([1.0, 2.0, 0.5, 0.5, 1.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, -1.0, 1.0, 0.0])
    ids = torch.tensor([0, 0, 1, 1, 1])
    weights, shares = tool.compare_weights(ratio.log(), advantages, ids, list_surrogates())
    assert shares == pytest.approx({"M": 0.4, "LN": 0.2, "HP": 0.2, "LP": 0.2, "HN": 0.0})
    clip, cispo = weights["clip"], weights["cispo"]
    assert clip.stopped == 0.5  # of the four tokens with A != 0
    assert clip.region_weight == pytest.approx({"M": 1.0, "LN": 0.0, "HP": 0.0, "LP": 0.5})
    assert clip.push == pytest.approx(1.5 / 4)
    assert clip.effective == pytest.approx(1.5**2 / (4 * 1.25))
    assert cispo.largest == pytest.approx(1.2)
    by_sequence, _ = tool.compare_weights(ratio.log(), advantages, ids, ["none"], ratio="sequence")
    assert by_sequence["none"].weights.tolist() == pytest.approx([math.sqrt(2)] * 2 + [0.25 ** (1 / 3)] * 3)


def test_the_command(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(run_dir), "--estimator", "gdpo", "--ratio", "sequence"]) == 0
    printed = capsys.readouterr().out
    for name in (*list_advantage_estimators(), *list_surrogates()):
        assert name in printed
    assert (run_dir / "compare_step_7.png").stat().st_size > 10_000


PLUGIN = """
from megatron_rl.methods.catalogue import Groups, advantage_estimator


@advantage_estimator(group_size=2)
def {name}(groups: Groups, *, scale: float = 1.0):
    rewards = groups.rewards.masked_fill(~groups.valid, float("nan"))
    return scale * (groups.rewards - rewards.nanmedian(1, keepdim=True).values)
"""


@pytest.mark.parametrize("named_by", ["the recipe", "the command"])
def test_methods_of_ones_own_are_compared(
    run_dir: Path, named_by: str, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    name = f"median_of_{named_by.split()[1]}"
    request.addfinalizer(lambda: CATALOGUE.pop((ESTIMATOR, name)))
    plugin = run_dir / f"{name}.py"
    plugin.write_text(PLUGIN.format(name=name))
    recipe = {"algorithm": {"plugins": [str(plugin)] if named_by == "the recipe" else ["gone.py"]}}
    (run_dir / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = ["compare", str(run_dir), "--estimator", name]
    if named_by == "the command":
        assert main(["compare", str(run_dir)]) == 2
        assert "go to the folder that the run was started in, or name it: --plugins" in capsys.readouterr().err
        command += ["--plugins", str(plugin)]
    spreads = []
    for params in ([], ["--params", f"{name}.scale=2", "clip.eps_high=20", "clip.eps_low=0.95"]):
        assert main([*command, *params]) == 0
        printed = capsys.readouterr().out
        assert f"advantages of {name}" in printed
        rows = [line.split("│") for line in printed.splitlines()]
        cells = {row[1].strip(): [cell.strip() for cell in row[2:]] for row in rows if len(row) > 2}
        spreads.append((float(cells[name][0]), cells["clip"], cells["gppo"]))
    assert spreads[1][0] == pytest.approx(2 * spreads[0][0], abs=2e-3)
    assert spreads[0][1] != spreads[1][1], "the clip's bound"
    assert spreads[0][2][:2] == spreads[1][2][:2], "no other weight's"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "6"], "step 6 was not recorded; there are 7"),
        (["--estimator", "remax"], "needs a greedy rollout"),
        (
            ["--estimator", "grp"],
            "unknown estimator 'grp'; did you mean 'grpo'?; one of your own is known with --plugins",
        ),
        (["--plugins", "absent.py"], "absent.py'"),
        (["--params", "clip.eps_high"], "write METHOD.KEY=VALUE"),
        (["--params", "clap.eps_high=0.3"], "unknown method 'clap'; did you mean 'clip'?"),
        (["--params", "clip.eps_hihg=0.3"], "did you mean 'eps_high'?"),
        (["--params", "clip.eps_high=wide"], "clip.eps_high=wide"),
        (["--plot", "plot.odd"], "cannot write plot.odd: Format 'odd' is not supported"),
        (["--plot", "nowhere/plot.png"], "cannot write nowhere/plot.png: No such file"),
        (["--params", "clip.eps_high=["], "--params clip.eps_high=["),
        (["--plot", "/"], "cannot write /: Is a directory"),
    ],
)
def test_mistakes(run_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["compare", str(run_dir), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_brackets_are_no_markup(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "of[").mkdir()
    place = run_dir / "of[" / "step].png"
    assert main(["compare", str(run_dir), "--plot", str(place)]) == 0
    assert f"plot: {place}" in capsys.readouterr().out
    assert place.is_file()


@pytest.mark.parametrize("recipe", ["", "[]", "algorithm: []", "algorithm: {plugins: }"])
def test_a_recipe_without_plugins(run_dir: Path, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "recipe.yaml").write_text(recipe)
    assert main(["compare", str(run_dir), "--step", "6"]) == 2
    said = capsys.readouterr().err
    assert ("holds no recipe" in said) == (recipe in ("", "[]"))
    assert ("step 6 was not recorded" in said) == ("algorithm" in recipe)


def test_a_run_without_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tmp_path)]) == 2
    assert "set logging.record_every" in capsys.readouterr().err
