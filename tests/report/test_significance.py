"""Differences between recipes over seeds: the exact test against every sign, the interval against the test, the page."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.cli import main
from megatron_rl.report import read_run, render
from megatron_rl.report.significance import effects_note, paired_difference, recipe_differences

from .run_folders import Outline, healthy, write_run


def every_sign(differences: list[float], expected: float = 0.0) -> float:
    """One-sided p of a mean above `expected`: how many of the 2^n signs give a sum as large."""
    deviations = [difference - expected for difference in differences]
    observed = sum(deviations)
    signs = itertools.product((1, -1), repeat=len(deviations))
    return sum(np.dot(sign, deviations) >= observed - 1e-12 for sign in signs) / 2 ** len(deviations)


@pytest.mark.parametrize("seed", range(6))
def test_p_counts_signs_and_the_interval_holds_what_the_test_does_not_reject(seed: int) -> None:
    drawn = np.random.default_rng(seed)
    first, second = drawn.normal(size=8).tolist(), (0.4 * seed + drawn.normal(size=8)).tolist()
    differences = np.subtract(second, first).tolist()
    result = paired_difference(first, second)
    assert result.mean == pytest.approx(np.mean(second) - np.mean(first))
    assert result.p == pytest.approx(
        min(1.0, 2 * min(every_sign(differences), every_sign([-each for each in differences])))
    )
    assert result.interval is not None
    low, high = result.interval
    opposite = [-each for each in differences]
    assert every_sign(differences, low - 1e-6) <= 0.025 < every_sign(differences, low + 1e-6)
    assert every_sign(opposite, -high - 1e-6) <= 0.025 < every_sign(opposite, -high + 1e-6)


def test_few_or_equal_seeds_show_nothing() -> None:
    five = paired_difference([0.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert (five.interval, five.p) == (None, 2 / 32)
    assert paired_difference([0.5] * 8, [0.5] * 8).p == 1.0
    six = paired_difference([0.0] * 6, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert (six.interval, six.p) == ((1.0, 6.0), 2 / 64)
    for pairs in (1, 17):
        with pytest.raises(ValueError, match=f"{pairs} pairs"):
            paired_difference([0.0] * pairs, [0.0] * pairs)


def test_of_many_seeds_the_note_says_which_are_compared(tmp_path: Path) -> None:
    recipes = ("grpo", {}), ("gdpo", {"algorithm": {"preset": "gdpo"}})
    runs = [
        read_run(write_run(tmp_path / f"{name}_seed={seed}", evaluated(0.5), recipe | {"seed": seed}))
        for seed in range(18)
        for name, recipe in recipes
    ]
    effects = recipe_differences(runs, ["eval/sums/avg@1"])
    assert effects[0].difference.pairs == 16
    assert "Of more than 16 seeds the first 16 are compared." in effects_note(effects)


def evaluated(score: float) -> list[dict[str, Any]]:
    return [*healthy(), {"step": 20, "time": 0.0, "eval/sums/avg@1": score, "eval/sums/stderr": 0.01}]


def test_a_sweep_s_runs_are_compared_by_their_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gdpo = {"algorithm": {"preset": "gdpo"}}
    folders = [
        write_run(tmp_path / f"{2 * seed + kind:03d}-preset={name}_seed={seed}", rows, recipe | {"seed": seed})
        for seed in range(6)
        for kind, (name, recipe, rows) in enumerate(
            (("grpo", {}, evaluated(0.5 + 0.1 * seed)), ("gdpo", gdpo, evaluated(0.5 + 0.11 * seed + 0.02)))
        )
    ]
    stopped = write_run(tmp_path / "stopped_seed=7", evaluated(0.0)[:5], gdpo | {"seed": 7})
    write_run(tmp_path / "012-preset=grpo_seed=7", evaluated(0.9), {"seed": 7})
    folders += [stopped, tmp_path / "012-preset=grpo_seed=7"]
    folders.append(write_run(tmp_path / "alone", evaluated(0.9), {"algorithm": {"preset": "rloo"}, "seed": 9}))
    runs = [read_run(folder) for folder in folders]
    [effect] = [each for each in recipe_differences(runs) if each.metric == "eval/sums/avg@1"]
    assert (effect.first, effect.second, effect.difference.pairs) == ("preset=grpo", "preset=gdpo", 6)
    assert effect.difference.mean == pytest.approx(0.045)
    assert effect.difference.p == 2 / 64
    page = "".join(Outline(render(runs)).text)
    assert "What difference the recipes made" in page
    assert "preset=gdpo, 7 seeds" in page
    assert "Against preset=grpo, complete runs, seed by seed" in page
    assert main(["report", *map(str, folders[:4]), "--output", str(tmp_path / "page.html")]) == 0
    said = capsys.readouterr().out
    assert "sums/avg@1: preset=gdpo: 0.575, +0.025, p = 0.5" in said
    assert "2 seeds cannot give a p below 0.5: take 6 or more." in said
    rewards = ["report", *map(str, folders), "--output", str(tmp_path / "page.html"), "--compare", "reward/mean"]
    assert main(rewards) == 0
    assert re.search(r"^reward/mean: preset=gdpo: \S+, \+0 \(\+0 to \+0\), p = 1$", capsys.readouterr().out, re.M)
    assert main([*rewards[:-1], "reward/men"]) == 2
    assert "did you mean 'reward/mean'" in capsys.readouterr().err
    assert main(["report", str(folders[0]), "--compare", "reward/mean"]) == 2
    assert "--compare needs several runs" in capsys.readouterr().err
