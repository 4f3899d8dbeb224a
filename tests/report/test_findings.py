"""What is pointed at in a run's metrics: nothing where it learns, and what is wrong with its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.report import find, read_run, render
from megatron_rl.report.charts import CHARTS, draw

from .run_folders import Outline, healthy, write_run


def test_a_run_that_learns_has_nothing_but_good_findings(tmp_path: Path) -> None:
    findings = find(read_run(write_run(tmp_path / "run", healthy())))
    assert [finding.level for finding in findings] == ["good"]
    assert "sums/avg@1 rose: 0.250 → 0.750 (step 20)" in findings[0].text


@pytest.mark.parametrize(
    ("deviation", "level", "words"),
    [
        ({"eval__sums__avg@1": [0.9, 0.5]}, "bad", "fell from its best, 0.900 at step 19"),
        ({"eval__sums__avg@1": [0.25]}, "look", "did not rise"),
        ({"groups__signal_share": [0.1] * 10}, "look", "only 10% of the groups had a signal"),
        ({"reward_signal_share__right": [0.0] * 20}, "look", "the reward right never differed"),
        ({"response_length__truncated_share": [0.5] * 10}, "look", "50% of the rollouts were cut"),
        ({"actor__entropy": [1e-3]}, "look", "hardly any exploration"),
        ({"actor__entropy": [4.0]}, "bad", "coming apart"),
        ({"actor__grad_norm_max": [30.0, 1.0]}, "look", "gradient norm 30 at step 19, 30 × the median"),
        ({"region_share__LN": [0.3] * 10}, "look", "31% of the tokens were outside the trust region"),
        ({"mismatch__abs_log_ratio": [0.5] * 4}, "bad", "trainer and engine drift apart"),
        ({"reward_timeouts__right": [2.0, 1.0]}, "look", "3 reward calls ran into their deadline (right)"),
    ],
)
def test_what_is_wrong_is_pointed_at_with_its_numbers(
    tmp_path: Path, deviation: dict[str, list[float]], level: str, words: str
) -> None:
    findings = find(read_run(write_run(tmp_path / "run", healthy(**deviation))))
    assert [finding.level for finding in findings if words in finding.text] == [level]
    assert findings[0].level != "good"  # the worst comes first


@pytest.mark.parametrize(
    ("values", "level", "words"),
    [
        ([0.39, 0.40], "look", "sums/avg@1 rose by 0.010, within noise (± 0.139)"),
        ([0.30, 0.60], "good", "sums/avg@1 rose: 0.300 → 0.600 (step 20), by 0.300 ± 0.139"),
        ([0.30, 0.62, 0.55], "good", "sums/avg@1 rose: 0.300 → 0.550"),
        ([0.30, 0.75, 0.50], "bad", "fell from its best, 0.750 at step 19"),
    ],
)
def test_a_change_of_an_evaluation_is_held_against_its_error(
    tmp_path: Path, values: list[float], level: str, words: str
) -> None:
    rows = healthy()
    for row, value in zip([rows[0], *rows[-len(values) + 1 :]], values, strict=True):
        row |= {"eval/sums/avg@1": value, "eval/sums/pass@1": value, "eval/sums/stderr": 0.05}
    run = read_run(write_run(tmp_path / "run", rows))
    assert [(finding.level, words in finding.text) for finding in find(run)] == [(level, True)]
    text = "".join(Outline(render([run])).text)
    assert f"{values[-1]:.3f} ± 0.050" in text
    assert "sums/stderr" not in text, "an error stands beside what it is of"
    assert "sums/pass@1" not in text, "which is avg@1"
    drawing = draw(CHARTS[0], [run])
    assert drawing is not None
    assert drawing.lines[0].low == pytest.approx([value - 0.05 for value in values])
