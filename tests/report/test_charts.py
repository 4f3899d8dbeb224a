"""The charts of a report: which metrics they draw, and the lines that they draw of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_rl.config.schema import PHASES
from megatron_rl.report import read_run, render
from megatron_rl.report.charts import CHARTS, COLOURS, _running_mean, draw, draw_staleness, draw_time, matching

from .run_folders import healthy, write_run


def test_a_metric_that_only_some_rows_have_and_a_cut_last_line_are_no_obstacle(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", healthy())
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "rew')
    run = read_run(folder)
    assert run.series("eval/sums/avg@1") == ([0, 20], [0.25, 0.75])
    assert run.rows[-1]["step"] == 20
    assert matching(CHARTS[0], [run]) == ["eval/sums/avg@1"]  # pass@1 of greedy decoding is the same number


def test_conversations_have_charts(tmp_path: Path) -> None:
    turns = {f"conversation/turn_{turn}/{what}": 1 / turn for turn in (1, 2, 10) for what in ("share", "tokens")}
    more = {"conversation/turns": 2.0, "conversation/tool_calls": 1.5, "conversation/calls/read": 1.5}
    run = read_run(write_run(tmp_path / "run", [{**row, **turns, **more} for row in healthy()]))
    drawn = {chart.title: matching(chart, [run]) for chart in CHARTS}
    assert drawn["Turns of a conversation"] == ["conversation/turns"]
    assert drawn["Share of the conversations with a turn k"] == [f"conversation/turn_{k}/share" for k in (1, 2, 10)]
    assert drawn["Tool calls of a conversation"] == ["conversation/tool_calls", "conversation/calls/read"]
    assert drawn["Conversations that failed, share"] == []


def test_the_running_mean_starts_at_the_first_value_and_passes_over_gaps() -> None:
    assert _running_mean([4.0, float("nan"), 4.0]) == pytest.approx([4.0, 4.0, 4.0])
    assert _running_mean([0.0, 1.0], weight=0.5) == pytest.approx([0.0, 2 / 3])


def test_the_warm_up_is_drawn(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", healthy())
    (folder / "sft").mkdir()
    rows = [{"step": step, "time": 1.0, "sft/loss": 2.0 / step, "actor/lr": 0.1} for step in (10, 20)]
    (folder / "sft" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = render([read_run(folder)])
    assert "The warm-up before RL" in page
    [data] = re.findall(r'id="curves-2">(.*?)</script>', page)
    assert json.loads(data)[0]["lines"][0]["y"] == [0.2, 0.1]


def test_every_phase_has_a_colour_of_its_own() -> None:
    assert len(set(COLOURS)) == len(COLOURS) >= len(PHASES)


def test_a_chart_has_the_run_s_numbers_and_a_gap_where_there_is_none(tmp_path: Path) -> None:
    nan = float("nan")
    rows = healthy(30, reward__mean=[nan, 0.123456789])
    [chart] = [chart for chart in CHARTS if chart.title == "Reward, weighted sum"]
    drawing = draw(chart, [read_run(write_run(tmp_path / "run", rows))])
    assert drawing is not None
    [line] = drawing.lines
    assert line.x == list(range(1, 31))
    assert line.y[:2] == [0.033333, 0.066667]
    assert line.y[-2:] == [None, 0.12346]
    assert line.mean is None  # of so few points


def test_the_layers_of_a_step_s_time_add_up_to_it(tmp_path: Path) -> None:
    drawing = draw_time(read_run(write_run(tmp_path / "run", healthy())), "time")
    assert drawing is not None
    assert [line.label for line in drawing.lines] == ["generate 62%", "update 25%", "other 12%"]
    assert [(line.low[0], line.high[0]) for line in drawing.lines if line.low and line.high] == [
        (0, 1.25),
        (1.25, 1.75),
        (1.75, 2),
    ]
    assert drawing.lines[-1].y[0] == 0.25


def test_partial_rollouts_show_how_old_their_tokens_are(tmp_path: Path) -> None:
    rows = healthy()
    for row in rows:
        row |= {"rollouts/staleness_mean": 0.75, "rollouts/staleness_max": 10.0}
        row |= {f"rollouts/staleness_{age}": share for age, share in enumerate([0.5, 0, 0.25, *[0.0] * 7, 0.25])}
    run = read_run(write_run(tmp_path / "run", rows))
    drawing = draw_staleness(run, "age")
    assert drawing is not None
    assert [line.label for line in drawing.lines] == ["0 50%", "2 25%", "10 25%"]  # in order, and those that there are
    assert [(line.low[-1], line.high[-1]) for line in drawing.lines if line.low and line.high] == [
        (0, 0.5),
        (0.5, 0.75),
        (0.75, 1),
    ]
    assert "How old trained tokens are" in render([run])
    for row in rows[-5:]:  # resumed with a larger rollout.partial.max_staleness
        row["rollouts/staleness_11"] = 0.25
    drawing = draw_staleness(read_run(write_run(tmp_path / "resumed", rows)), "age")
    assert drawing is not None
    assert drawing.lines[-1].y[-6:] == [0.0, *[0.25] * 5]
    synchronous = read_run(write_run(tmp_path / "other", healthy()))
    assert draw_staleness(synchronous, "age") is None
    assert "How old trained tokens are" not in render([synchronous])


def test_what_generators_do_beside_a_step_is_no_part_of_it(tmp_path: Path) -> None:
    rows = [{**row, "timing_s/generate": 7.0, "timing_s/wait": 0.25, "timing_s/step": 2.0} for row in healthy()]
    drawing = draw_time(read_run(write_run(tmp_path / "run", rows)), "time")
    assert drawing is not None
    names = [line.label.split()[0] for line in drawing.lines]
    assert "wait" in names
    assert "generate" not in names
