"""What `megatron-rl status` makes of a run folder. The folders are written by the product's own writers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_rl.base.messages import ConfigError
from megatron_rl.cli import main
from megatron_rl.report import status as run_status
from megatron_rl.report.status import SILENT_SECONDS, read_status
from megatron_rl.runtime import exit_codes, postmortem
from megatron_rl.runtime.attempts import new_attempt
from megatron_rl.runtime.heartbeat import Deadlines, Heartbeat, heartbeats
from megatron_rl.runtime.spawn import run_ranks


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run_status, "beat_interval", lambda world: 0.2)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"run_dir": str(folder), "trainer": {"steps": 10}}))
    return folder


def beating(attempt: Path, step: int = 4, phase: str = "update", ranks: int = 2) -> list[Heartbeat]:
    """Ranks that have begun a phase just now."""
    found = []
    for rank in range(ranks):
        progress = Heartbeat()
        progress.attach(postmortem.heartbeat_folder(attempt), rank, ranks, Deadlines(60, {}))
        progress.begin("RL", 0, 10)
        progress.step = step
        progress.enter(phase)
        found.append(progress)
    return found


def age(attempt: Path, seconds: float, ranks: tuple[int, ...] = (0, 1)) -> None:
    """Makes the heartbeats of these ranks that much older."""
    for rank, beat in heartbeats(postmortem.heartbeat_folder(attempt)).items():
        if rank in ranks:
            beat["time"] -= seconds
            (postmortem.heartbeat_folder(attempt) / f"rank_{rank}.json").write_text(json.dumps(beat))


def metrics(run_dir: Path, rows: list[dict[str, Any]]) -> None:
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9, "ti')


def test_a_running_run_says_where_it_is_and_how_long_it_takes(run_dir: Path) -> None:
    beating(new_attempt(run_dir))
    rows = [{"step": n, "time": 100.0 + 30 * n, "timing_s/step": 20.0, "reward/mean": n / 10} for n in range(1, 5)]
    metrics(run_dir, [{"step": 0, "time": 100.0, "eval/sums/avg@1": 0.25}, *rows])
    status = read_status(run_dir)
    assert (status.state, status.step, status.steps, status.phase) == ("running", 4, 10, "update")
    assert status.seconds_per_step == 30.0, "with what lies between the steps"
    assert status.eta_seconds == 180.0
    assert status.metrics["reward/mean"] == 0.4
    assert status.evaluation == {"eval/sums/avg@1": 0.25}
    assert status.continue_with is None
    assert "running, RL step 4 of 10, in `update` for 0 s; 30.0 s per step, 3 min 0 s to go" in status.text()


def test_the_time_between_two_attempts_is_no_step_s(run_dir: Path) -> None:
    attempt, now = new_attempt(run_dir), time.time()
    (attempt / "environment.json").write_text("{}")
    os.utime(attempt / "environment.json", (now - 100, now - 100))
    beating(attempt)
    rows = [{"step": n, "time": now - 36000 + 30 * n, "timing_s/step": 20.0} for n in range(1, 3)]
    rows += [{"step": n, "time": now - 120 + 30 * n, "timing_s/step": 20.0} for n in range(3, 5)]
    metrics(run_dir, rows)
    assert read_status(run_dir).seconds_per_step == pytest.approx(30.0)
    metrics(run_dir, rows[:3])
    assert read_status(run_dir).seconds_per_step == 20.0, "of one step nothing else is known yet"


@pytest.mark.parametrize("end", ["", "1", "x"])
@pytest.mark.parametrize("environment", ["[]", "{}", '{"command": null}', '{"command": ["m", "evaluate", "--resume"]}'])
def test_what_a_full_disk_has_cut_short_ends_no_status(run_dir: Path, end: str, environment: str) -> None:
    attempt = new_attempt(run_dir)
    (attempt / "end").write_text(end)
    (attempt / "environment.json").write_text(environment)
    (run_dir / "recipe.yaml").write_text("seed: 0\n")
    status = read_status(run_dir)
    assert status.state == "failed"
    assert status.continue_with is not None
    assert ("its launcher could not write how" in status.text()) == (end != "1")
    (run_dir / "metrics.jsonl").write_text("[1]\n")
    with pytest.raises(ConfigError, match="rows without a step"):
        read_status(run_dir)


def test_a_rank_without_a_heartbeat_is_named(run_dir: Path) -> None:
    attempt = new_attempt(run_dir)
    beating(attempt)
    age(attempt, SILENT_SECONDS + 1, ranks=(1,))
    status = read_status(run_dir)
    assert status.state == "running"
    assert status.slowest.startswith("1 of 2 ranks SILENT: 1 on ")


def test_a_run_whose_machine_is_gone_is_silent_and_can_be_continued(run_dir: Path) -> None:
    attempt = new_attempt(run_dir)
    beating(attempt)
    age(attempt, 3600)
    status = read_status(run_dir)
    assert status.state == "silent"
    assert status.continue_with == f"megatron-rl train {run_dir}/recipe.yaml   (starts over: there is no checkpoint)"
    assert "SILENT: no heartbeat for 1 h 0 min, RL step 4 of 10, last seen in `update`" in status.text()


def test_a_heartbeat_that_moves_is_alive_whatever_the_clock_says(run_dir: Path) -> None:
    attempt = new_attempt(run_dir)
    beating(attempt)
    age(attempt, 7200)  # the clock was set two hours ahead since their last beat
    path = postmortem.heartbeat_folder(attempt) / "rank_0.json"
    end = threading.Event()

    def beat() -> None:
        record = json.loads(path.read_text())
        while not end.wait(0.05):
            record["beat"] += 1
            path.with_suffix(".new").write_text(json.dumps(record))
            path.with_suffix(".new").replace(path)

    heart = threading.Thread(target=beat)
    heart.start()
    try:
        status = read_status(run_dir)
    finally:
        end.set()
        heart.join()
    assert status.state == "running"
    assert status.slowest.startswith("1 of 2 ranks SILENT: 1 on "), "rank 1 does not beat"


def test_ranks_that_were_killed_here_are_known_to_be_gone_at_once(run_dir: Path) -> None:
    attempt = new_attempt(run_dir)
    beating(attempt)
    for rank, beat in heartbeats(postmortem.heartbeat_folder(attempt)).items():
        beat["started"] += 1  # its number belongs to another process now
        (postmortem.heartbeat_folder(attempt) / f"rank_{rank}.json").write_text(json.dumps(beat))
    status = read_status(run_dir)
    assert status.state == "silent"
    assert status.continue_with is not None


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["train", "--run-dir", "x", "--resume", "auto"], "train {}   (starts over: there is no checkpoint)"),
        (["evaluate", "--run-dir", "x", "--resume", "/runs/a b/step_4"], "evaluate --model '/runs/a b/step_4' {}"),
        (["evaluate", "--run-dir", "x", "--resume", "never"], "evaluate {}"),
    ],
)
def test_the_command_that_continues_is_whole(run_dir: Path, words: list[str], shown: str) -> None:
    attempt = new_attempt(run_dir)
    (attempt / "environment.json").write_text(json.dumps({"command": ["main.py", *words]}))
    (attempt / "end").write_text("143 rank 0 on here\n")
    assert read_status(run_dir).continue_with == "megatron-rl " + shown.format(run_dir / "recipe.yaml")


def test_a_finished_run(run_dir: Path) -> None:
    for progress in beating(new_attempt(run_dir), step=10):
        progress.leave()
        progress.finish()
    assert read_status(run_dir).state == "finished"


@pytest.mark.parametrize(
    ("code", "state", "why"),
    [
        (exit_codes.STALLED, "failed", "it hung"),
        (exit_codes.OUT_OF_MEMORY, "failed", "memory ran out"),
        (exit_codes.REQUEUE, "stopped", "stopped on request"),
        (-9, "failed", "killed (SIGKILL)"),
    ],
)
def test_an_attempt_that_ended_badly_says_why_in_its_own_words(run_dir: Path, code: int, state: str, why: str) -> None:
    attempt = new_attempt(run_dir)
    script = (
        "import os, sys; print('megatron-rl: the reason', file=sys.stderr); sys.stderr.flush();"
        f"os.kill(os.getpid(), {-code}) if {code} < 0 else sys.exit({code})"
    )
    run_ranks([sys.executable, "-c", script], 1, attempt)
    beating(attempt)
    status = read_status(run_dir)
    assert (status.state, status.why) == (state, why)
    assert status.says == ["megatron-rl: the reason"]
    assert status.code == (code if code > 0 else 128 - code)
    assert status.continue_with is not None


def test_what_to_mend_is_said_before_how_to_continue(run_dir: Path) -> None:
    attempt = new_attempt(run_dir)
    (attempt / "end").write_text("2 rank 0 on here\n")
    text = read_status(run_dir).text()
    assert "first         correct what the message names in your recipe or its data" in text
    assert "to continue   the same command, with the corrected recipe" in text
    assert f"megatron-rl train {run_dir}" not in text, "that is the recipe that cannot run"
    (attempt / "end").write_text("76 rank 0 on here\n")
    assert read_status(run_dir).first == ""


def test_a_slurm_job_is_continued_by_its_own_line_or_by_slurm(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = new_attempt(run_dir)
    (attempt / "submitted").write_text("cd /code && slurm/submit.sh --nodes=4 train my.yaml\n")
    (attempt / "end").write_text("143 job 12 on n1: Slurm has ended it (CANCELLED)\n")
    (run_dir / "checkpoints").mkdir()
    status = read_status(run_dir)
    assert (status.state, status.why) == ("stopped", "job 12 on n1: Slurm has ended it (CANCELLED)")
    assert str(status.continue_with).startswith("cd /code && slurm/submit.sh --nodes=4 train my.yaml")
    (attempt / "requeued").write_text("12\n")
    squeue, by_itself = tmp_path / "bin" / "squeue", "Slurm has requeued job 12, which continues by itself"
    monkeypatch.setenv("PATH", str(squeue.parent))
    own = "cd /code && slurm/submit.sh --nodes=4 train my.yaml"
    assert f"; if it was cancelled since: {own}" in str(read_status(run_dir).continue_with), "nobody to ask"
    squeue.parent.mkdir()
    invalid = "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1"
    for said, expected in (("echo 12 PD", by_itself), ("true", own), (invalid, own), ("exit 1", by_itself)):
        squeue.write_text(f"#!/bin/sh\n{said}\n")
        squeue.chmod(0o755)
        assert str(read_status(run_dir).continue_with).startswith(expected)


def test_a_stop_is_told_by_rank_0_whoever_ended_first(run_dir: Path) -> None:
    attempt = new_attempt(run_dir)
    (attempt / "rank_0.log").write_text("megatron-rl: stopped by SIGUSR1; the same command continues\n")
    (attempt / "rank_1.log").write_text("W1122 a warning of long ago\n")
    (attempt / "end").write_text("75 rank 1 on here\n")
    assert read_status(run_dir).says == ["megatron-rl: stopped by SIGUSR1; the same command continues"]


def test_a_post_mortem_is_quoted(run_dir: Path) -> None:
    attempt = new_attempt(run_dir)
    beating(attempt)
    folder = postmortem.folder_of(attempt)
    folder.mkdir(parents=True)
    (folder / postmortem.REPORT).write_text("the run hung: rank 1 is behind\n")
    text = read_status(run_dir).text()
    assert "rank 1 is behind" in text
    assert f"post-mortem   {folder}" in text


def test_only_the_newest_attempt_counts(run_dir: Path) -> None:
    first = new_attempt(run_dir)
    (first / "end").write_text("1 rank 0 on here\n")
    status = read_status(run_dir)
    assert (status.state, status.attempt) == ("failed", 1)
    beating(new_attempt(run_dir))
    status = read_status(run_dir)
    assert (status.state, status.attempt, status.code) == ("running", 2, None)


def test_the_command_prints_json_and_needs_no_torch(run_dir: Path) -> None:
    beating(new_attempt(run_dir))
    code = (
        "import sys; from megatron_rl.cli import main; code = main(sys.argv[1:]);"
        "assert not {'torch', 'transformers', 'vllm'} & set(sys.modules); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "status", str(run_dir), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env={**os.environ})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "running"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == exit_codes.BAD_INPUT
    assert "is no run folder: it has no recipe.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["status", "RUN", "--follow"], ["preflight", "RECIPE", "--minutes"]])
@pytest.mark.parametrize("number", ["nan", "inf", "-1", "1e300", "x"])
def test_times_that_cannot_be(options: list[str], number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*options[:-1], f"{options[-1]}={number}"])
    assert "must not be " in (said := capsys.readouterr().err) or "must be above 0" in said or "is no number" in said


def test_following_ends_with_the_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for progress in beating(new_attempt(run_dir)):
        progress.finish()
    started = time.monotonic()
    assert main(["status", str(run_dir), "--follow", "60"]) == 0
    assert time.monotonic() - started < 30
    assert capsys.readouterr().out.count("finished") == 1
