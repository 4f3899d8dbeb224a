"""Predicted beside published times: errors stand where docs/layouts-evidence.md says, within what the model is good for."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.step_time import Result, lines, pretraining_results, rl_results

PAGE = (Path(__file__).parents[2] / "docs" / "layouts-evidence.md").read_text("utf-8")
RESULTS = {"RL steps": list(rl_results()), "pre-training": list(pretraining_results())}
# Rows that the model misses, and of which docs/layouts-evidence.md talks about.
MISSED = {("DeepSeek-V3", "gb200")}


@pytest.mark.parametrize("title", RESULTS)
def test_the_page_has_the_tables(title: str) -> None:
    assert "\n".join(lines(title, RESULTS[title])) in PAGE, "run python -m benchmarks.step_time and paste its table"


def test_training_is_within_a_quarter_and_steps_within_35_per_cent() -> None:
    def far(rows: list[Result], most: float) -> set[tuple[str, str]]:
        return {(row.name, row.hardware) for row in rows if abs(row.error) > most}

    assert far(RESULTS["pre-training"], 0.25) == set()
    assert far(RESULTS["RL steps"], 0.35) == MISSED


def test_half_of_the_rows_are_held_out_and_no_worse() -> None:
    rows = [row for rows in RESULTS.values() for row in rows]
    held = [abs(row.error) for row in rows if row.held_out]
    assert len(held) >= len(rows) / 2
    assert sorted(held)[len(held) // 2] < 0.25
