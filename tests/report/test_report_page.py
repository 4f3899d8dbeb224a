"""The page of a report: what it says of runs and shows of their rollouts, where it is written, and how it is served."""

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
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_rl.cli import main
from megatron_rl.report import read_run, render
from megatron_rl.report.page import chosen_groups
from megatron_rl.report.run_record import differing_keys
from megatron_rl.report.status import RunStatus

from .run_folders import Outline, healthy, rollout, sampled, write_run


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
    run = str(write_run(tmp_path / "run", healthy()))
    for page, why in ((f"{tmp_path}/nowhere/page.html", "No such file or directory"), (".", "Device or resource busy")):
        assert main(["report", run, "--output", page]) == 1
        assert f"cannot write {page}: {why}" in capsys.readouterr().err


@pytest.mark.parametrize(("missing", "words"), [("recipe.yaml", "no run folder"), ("metrics.jsonl", "no metrics yet")])
def test_a_folder_that_is_no_run_is_refused(
    tmp_path: Path, missing: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", healthy())
    (folder / missing).unlink()
    assert main(["report", str(folder)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("metrics.jsonl", b"[1]\n", "metrics.jsonl cannot be read: it has rows without a step"),
        ("metrics.jsonl", b'{"time": 1}\n', "metrics.jsonl cannot be read: it has rows without a step"),
        (
            "metrics.jsonl",
            b'{"step": 1, "a": 1%s}\n' % (b"0" * 400),
            "metrics.jsonl cannot be read: a of a row is an integer beyond",
        ),
        ("samples/step_5.jsonl", b'{"prompt": "p", "response": "r"}\n', "step_5.jsonl has rows that are no rollouts"),
        ("rollouts/step_5.npz", b"", "step_5.npz cannot be read: No data left in file"),
        ("rollouts/step_5.npz", b"PK\x03\x04", "step_5.npz cannot be read: File is not a zip file"),
    ],
)
def test_a_damaged_file_of_a_run_is_named(
    tmp_path: Path, file: str, content: bytes, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", healthy())
    (folder / "rollouts").mkdir()
    row = {"prompt": "p", "response": "r", "rewards": {"right": 1.0}, "tokens": 1, "pieces": ["r"]}
    (folder / "samples" / "step_5.jsonl").write_text(json.dumps(row))
    (folder / file).write_bytes(content)
    assert main(["report", str(folder)]) == 2
    assert words in capsys.readouterr().err


def test_a_step_that_took_for_ever_is_shown(tmp_path: Path) -> None:
    rows = [{**row, "timing_s/step": float("inf")} for row in healthy()]
    assert "inf s" in render([read_run(write_run(tmp_path / "run", rows))])


def test_a_recipe_whose_sections_are_none_is_shown(tmp_path: Path) -> None:
    recipe = {"model": None, "trainer": 3, "rewards": {"right": None}, "algorithm": {"preset": ["x"]}}
    run = read_run(write_run(tmp_path / "run", healthy(), recipe))
    assert "a model made at start-up; step 20 of None" in render([run])
    assert run.is_complete()


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
