from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_rl.cli import main
from megatron_rl.config.schema import PHASES
from megatron_rl.report import find, read_run, render
from megatron_rl.report.charts import CHARTS, COLOURS, _running_mean, draw, draw_staleness, draw_time, matching
from megatron_rl.report.page import chosen_groups
from megatron_rl.report.run_record import differing_keys
from megatron_rl.report.status import RunStatus

VOID = {"meta", "br", "input", "wbr"}


class Outline(HTMLParser):
    """Collects the text, and fails on tags that do not nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def write_run(folder: Path, rows: list[dict[str, Any]], recipe: dict[str, Any] | None = None) -> Path:
    (folder / "samples").mkdir(parents=True)
    (folder / "logs" / "attempt_1").mkdir(parents=True)
    preset = {"algorithm": {"preset": "grpo"}, "trainer": {"steps": 20}, "seed": 0, "run_dir": str(folder)}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(preset | (recipe or {})))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sample = {
        "prompt": "1 < 2 & <b>?",
        "response": "</td><script>x",
        "rewards": {"right": 1.0},
        "advantage": 0.5,
        "tokens": 4,
    }
    (folder / "samples" / "step_5.jsonl").write_text(json.dumps(sample) + "\n")
    newest = json.dumps(sample | {"response": "the\u2028newest"}, ensure_ascii=False)  # no line ends at U+2028 in JSON
    (folder / "samples" / "step_10.jsonl").write_text(f"{newest}\n" * 2, encoding="utf-8")
    (folder / "samples" / "eval_sums_step_20.jsonl").write_text("not looked at")
    return folder


def healthy(count: int = 20, **more: list[float]) -> list[dict[str, Any]]:
    """Rows of a run that learns; `more`: metrics that deviate, with `__` for a slash."""
    rows: list[dict[str, Any]] = [{"step": 0, "time": 1.0, "eval/sums/avg@1": 0.25, "eval/sums/pass@1": 0.25}]
    for step in range(1, count + 1):
        rows.append(
            {
                "step": step,
                "time": 1.0 + step,
                "reward/mean": step / count,
                "reward/right": step / count,
                "reward_signal_share/right": 0.5,
                "groups/signal_share": 0.5,
                "response_length/truncated_share": 0.0,
                "actor/entropy": 1.0 / step,
                "actor/grad_norm_max": 1.0,
                "region_share/LN": 0.01,
                "region_share/HP": 0.01,
                "mismatch/abs_log_ratio": 1e-6,
                "timing_s/step": 2.0,
                "timing_s/generate": 1.25,
                "timing_s/update": 0.5,
            }
        )
    rows[-1] |= {"eval/sums/avg@1": 0.75, "eval/sums/pass@1": 0.75}
    for name, values in more.items():
        for row, value in zip(rows[-len(values) :], values, strict=True):
            row[name.replace("__", "/")] = value
    return rows


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


def test_the_page_nests_escapes_what_the_model_said_and_holds_every_curve(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", healthy()))
    page = render([run])
    outline = Outline(page)
    text = "".join(outline.text)
    assert (
        outline.tags.count("script") == 5
    )  # data of curves, times and rollouts, and what draws them; none of the model's
    assert "1 < 2 & <b>?" in text
    assert "the\u2028newest" in text
    for title in ("Evaluation", "Reward columns", "Entropy, nats per token", "Seconds per step, by phase", "Findings"):
        assert title in text
    assert json.dumps("Shrinkage λ") not in text  # the run has no such metric
    assert "other 12%" in text  # 2 s per step, of which 1.75 are phases
    assert render([run]) == page


def test_runs_side_by_side_say_where_their_recipes_differ(tmp_path: Path) -> None:
    first = write_run(tmp_path / "first", healthy())
    second = write_run(tmp_path / "second", healthy(), {"algorithm": {"preset": "gdpo", "kl": {"coef": 0.1}}})
    runs = [read_run(first), read_run(second)]
    assert differing_keys(runs) == {"algorithm.preset": ["grpo", "gdpo"], "algorithm.kl.coef": [None, 0.1]}
    text = "".join(Outline(render(runs)).text)
    for words in ("2 runs", "Where the recipes differ", "algorithm.kl.coef", "second"):
        assert words in text


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


def test_the_command_writes_the_page_into_the_run_folder_without_torch(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", healthy())
    code = (
        "import sys\nfrom megatron_rl.cli import main\ncode = main(sys.argv[1:])\n"
        "assert not {'torch', 'vllm', 'megatron'} & set(sys.modules)\nsys.exit(code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "report", str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ},
    )
    assert result.returncode == 0, result.stderr
    assert "good: sums/avg@1 rose" in result.stdout
    Outline((folder / "report.html").read_text())


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "nowhere" / "page.html"
    assert main(["report", str(write_run(tmp_path / "run", healthy())), "--output", str(page)]) == 1
    assert f"cannot write {page}: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(("missing", "words"), [("recipe.yaml", "no run folder"), ("metrics.jsonl", "no metrics yet")])
def test_a_folder_that_is_no_run_is_refused(
    tmp_path: Path, missing: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", healthy())
    (folder / missing).unlink()
    assert main(["report", str(folder)]) == 2
    assert words in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- rollouts
def rollout(prompt: str, response: str, reward: float, tokens: int = 4, ended: str = "stop") -> dict[str, Any]:
    facts = {"sample": prompt, "prompt": prompt, "response": response, "rewards": {"right": reward}, "advantage": 0.0}
    return facts | {"tokens": tokens, "finish_reason": ended}


def sampled(folder: Path, steps: dict[int, list[dict[str, Any]]]) -> Path:
    write_run(folder, healthy())
    for path in (folder / "samples").glob("step_*.jsonl"):
        path.unlink()
    for step, rows in steps.items():
        (folder / "samples" / f"step_{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_handful_of_groups_is_shown_over_the_run(tmp_path: Path) -> None:
    steps = {step: [rollout(f"q{step}", "r", 0.5), rollout(f"p{step}", "r", 0.5)] for step in range(1, 31)}
    steps[1][0] |= {"rewards": {"right": 0.4}}
    steps[8] = [rollout("worst", "r", -1.0), rollout("best", "r", 2.0)]
    steps[18] = [rollout("longest", "r", 0.5, tokens=900), rollout("cut", "r", 0.5, ended="length")]
    record = read_run(sampled(tmp_path / "run", steps))
    assert len(record.samples) == 30
    found = {group.rollouts[0]["prompt"]: (group.step, why) for group, why in chosen_groups(record)}
    assert found == {
        "q1": (1, ["first step"]),
        "worst": (8, ["lowest reward"]),
        "best": (8, ["highest reward"]),
        "q16": (16, ["middle"]),
        "longest": (18, ["longest response"]),
        "cut": (18, ["cut at the token limit"]),
        "q30": (30, ["last step"]),
    }
    text = "".join(Outline(render([record])).text)
    for prompt in found:
        assert prompt in text


def test_a_long_text_is_cut_with_the_rest_behind_a_click(tmp_path: Path) -> None:
    long = "".join(f"<{number}>" for number in range(4000))
    page = render([read_run(sampled(tmp_path / "run", {1: [rollout("q", long, 1.0)]}))])
    outline = Outline(page)
    assert long in "".join(outline.text).replace(f"… show all {len(long):,} characters", "")
    folded = page.index('<details class="more">')
    assert page[:folded].count("&lt;") < 300


def test_half_a_surrogate_pair_neither_ends_the_report_nor_the_page_that_is_there(tmp_path: Path) -> None:
    folder = sampled(tmp_path / "run", {1: [rollout("q", "half \ud83d of it", 1.0)]})
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "half \\ud83d of it" in page
    assert not list(folder.glob(".report*"))


def test_a_page_that_cannot_be_drawn_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run", healthy())
    (folder / "report.html").write_text("before")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert main(["report", str(folder)]) == 1
    assert (folder / "report.html").read_text() == "before"
    assert not list(folder.glob(".report*"))


def weighted(folder: Path, weights: dict[str, float], rows: list[dict[str, Any]]) -> Path:
    sampled(folder, {1: rows})
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe["rewards"] = {name: {"reward": "format", "weight": weight} for name, weight in weights.items()}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def test_a_reward_is_the_weighted_sum_wherever_the_page_shows_one(tmp_path: Path) -> None:
    """A penalty is not a prize, and a score that never came is the mean of its prompt's others, as in `reward/mean`."""
    rows = [rollout("q", "wrong", 0.0) | {"rewards": {"right": 0.0, "brief": 1.0, "judge.tone": 0.5}, "rollout": 0}]
    rows += [rollout("q", "right", 1.0) | {"rewards": {"right": 1.0, "brief": 0.0, "judge.tone": None}, "rollout": 1}]
    weights = {"right": 1.0, "brief": -1.0, "judge": 0.1}
    run = read_run(weighted(tmp_path / "run", weights, rows))
    assert run.rewards(rows) == pytest.approx([-0.95, 1.05])
    page = render([run])
    assert "reward 0.05, up to" in page
    shown = json.loads(re.findall(r'id="rollouts">(.*?)</script>', page, re.DOTALL)[0])["rows"]
    assert [row["reward"] for row in shown] == pytest.approx([-0.95, 1.05])


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


def test_the_page_names_the_estimator_and_the_weight_that_ran(tmp_path: Path) -> None:
    own = {"preset": "grpo", "estimator": {"name": "median_baseline"}, "weight": {"name": "clip"}}
    head = render([read_run(write_run(tmp_path / "own", healthy(), {"algorithm": own}))])
    assert "estimator median_baseline, else as grpo, on" in head
    usual = {"preset": "grpo", "estimator": {"name": "grpo"}, "weight": {"name": "clip"}}
    assert '<p class="sub">grpo on' in render(
        [read_run(write_run(tmp_path / "usual", healthy(), {"algorithm": usual}))]
    )


def test_an_empty_section_is_no_difference_of_recipes(tmp_path: Path) -> None:
    first = write_run(tmp_path / "first", healthy(), {"sft": {}})
    second = write_run(tmp_path / "second", healthy(), {"sft": {"steps": 3}})
    runs = [read_run(first), read_run(second)]
    assert differing_keys(runs) == {"sft.steps": [None, 3]}
    assert "None" not in "".join(Outline(render(runs)).text)


def test_a_telephone_draws_the_page_at_its_own_width(tmp_path: Path) -> None:
    page = render([read_run(write_run(tmp_path / "run", healthy()))])
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert "white-space: nowrap" in re.findall(r"td\.n, th\.n \{(.*?)\}", page)[0]
    [table] = re.findall(r"<details class=.group.*?<table>(.*?)</table>", page, re.DOTALL)[:1]
    assert table.count('<td class="n">') == 4, "reward, advantage, tokens, end: one line each"


def test_the_warm_up_is_drawn(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", healthy())
    (folder / "sft").mkdir()
    rows = [{"step": step, "time": 1.0, "sft/loss": 2.0 / step, "actor/lr": 0.1} for step in (10, 20)]
    (folder / "sft" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = render([read_run(folder)])
    assert "The warm-up before RL" in page
    [data] = re.findall(r'id="curves-2">(.*?)</script>', page)
    assert json.loads(data)[0]["lines"][0]["y"] == [0.2, 0.1]


# ------------------------------------------------------------------------------------------------------------- charts
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
    synchronous = read_run(write_run(tmp_path / "other", healthy()))
    assert draw_staleness(synchronous, "age") is None
    assert "How old trained tokens are" not in render([synchronous])


def test_a_served_page_is_drawn_anew_where_the_run_went_on(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", healthy())
    command = [sys.executable, "-m", "megatron_rl", "report", str(folder), "--serve", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            [address] = re.findall(r"http://localhost:(\d+)", process.stdout.readline())
            url = f"http://127.0.0.1:{address}"

            def page() -> str:
                with urllib.request.urlopen(url, timeout=120) as answer:
                    return str(answer.read().decode())

            assert "step 20 of 20" in page()
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(healthy(21)[-1]) + "\n")
            with socket.create_connection(("127.0.0.1", int(address))):  # one that sends nothing is nobody's matter
                assert "step 21 of 20" in page()
            for name in ("localhost", "LOCALHOST:1", "[::1]:80"):
                with urllib.request.urlopen(urllib.request.Request(url, headers={"Host": name}), timeout=120) as answer:
                    assert answer.status == 200
            for name in ("evil.example", "localhost.evil.example:80", ""):
                with pytest.raises(urllib.error.HTTPError, match="421"):
                    urllib.request.urlopen(urllib.request.Request(url, headers={"Host": name}), timeout=120)
            (folder / "metrics.jsonl").rename(folder / "moved")
            with pytest.raises(urllib.error.HTTPError, match="500") as failed:
                page()
            assert "metrics.jsonl" in failed.value.read().decode()
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"{url}/recipe.yaml", timeout=120)
        finally:
            process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    assert not (folder / "report.html").exists()


def test_a_status_breaks_its_numbers_between_them(tmp_path: Path) -> None:
    status = RunStatus("runs/x", "finished", metrics={f"some/metric_{i}": 0.123456 for i in range(8)})
    lines = status.text(80).splitlines()
    assert all(len(one) <= 80 for one in lines)
    assert "".join(lines).count("0.1235") == 8
    assert [one for one in status.text().splitlines() if one.count("0.1235") == 8], "a file's lines have no end"


def test_what_generators_do_beside_a_step_is_no_part_of_it(tmp_path: Path) -> None:
    rows = [{**row, "timing_s/generate": 7.0, "timing_s/wait": 0.25, "timing_s/step": 2.0} for row in healthy()]
    drawing = draw_time(read_run(write_run(tmp_path / "run", rows)), "time")
    assert drawing is not None
    names = [line.label.split()[0] for line in drawing.lines]
    assert "wait" in names
    assert "generate" not in names
