"""Several seeds of one recipe in one page: their mean, in a band."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_rl.report import read_run, render
from megatron_rl.report.charts import Chart, _together, draw
from megatron_rl.report.run_record import by_recipe

from .run_folders import Outline, healthy, write_run


def shifted(by: float) -> list[dict[str, Any]]:
    rows = healthy()
    return [row | {"reward/mean": round(row["reward/mean"] + by, 4)} if "reward/mean" in row else row for row in rows]


def test_seeds_of_a_recipe_are_one_line_in_a_band(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / f"grpo-{seed}", shifted(seed * 0.1), {"seed": seed})) for seed in range(3)]
    other = read_run(write_run(tmp_path / "gdpo", healthy(), {"algorithm": {"preset": "gdpo"}}))
    assert [[run.name for run in seeds] for seeds in by_recipe([runs[0], other, *runs[1:]])] == [
        ["grpo-0", "grpo-1", "grpo-2"],
        ["gdpo"],
    ]
    chart = Chart("Reward, weighted sum", ("reward/mean",))
    drawn, alone = draw(chart, [*runs, other]), draw(chart, [runs[0], other])
    assert drawn is not None
    assert alone is not None
    seeds, single = drawn.lines
    assert (seeds.label, single.label) == ("grpo-0, 3 seeds", "gdpo")
    assert seeds.y[:2] == [0.15, 0.2]  # of .05, .15 and .25; .1, .2 and .3
    assert (seeds.low, seeds.high) == (runs[0].series("reward/mean")[1], runs[2].series("reward/mean")[1])
    assert all(line.low is None for line in (single, *alone.lines))
    page = "".join(Outline(render([*runs, other])).text)
    assert "4 runs" in page
    assert "Where the recipes differ" in page


def test_the_mean_is_over_steps_that_all_have() -> None:
    steps, values = _together([([1, 2, 3], [1.0, 2.0, 3.0]), ([2, 3, 4], [4.0, 5.0, 6.0]), ([], [])])
    assert steps == [2, 3]
    assert values == [[2.0, 4.0], [3.0, 5.0]]
