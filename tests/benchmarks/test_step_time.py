"""Predicted beside published times: errors are within what docs/layouts-evidence.md says the model is good for."""

from __future__ import annotations

from benchmarks.step_time import Result, pretraining_results, rl_results

RESULTS = {"RL steps": list(rl_results()), "pre-training": list(pretraining_results())}
# Rows that the model misses, and of which docs/layouts-evidence.md talks about.
MISSED = {("DeepSeek-V3", "gb200")}


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
