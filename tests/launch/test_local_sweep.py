"""A sweep on this machine: every line with every seed, some at a time, others go on where one fails, signals end it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_rl import cli
from megatron_rl.launch import local_sweep
from megatron_rl.launch.local_sweep import LocalSweep, with_seeds
from megatron_rl.runtime import process

from .jobs import write_recipe


def test_all_lines_of_a_seed_come_before_the_next_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert with_seeds(["a=1", "a=2"], 2) == ["a=1 seed=0", "a=2 seed=0", "a=1 seed=1", "a=2 seed=1"]
    assert with_seeds(["a=1", "seed=5"], None) == ["a=1", "seed=5"]
    recipe, file = str(write_recipe(tmp_path)), tmp_path / "sweep.txt"
    file.write_text("algorithm.preset=grpo\nalgorithm.preset=rloo\n")
    assert cli.main(["sweep", str(file), recipe, "--seeds", "2", f"run_dir={tmp_path}/s", "--check"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/s/000-algorithm.preset=grpo_seed=0",
        f"{tmp_path}/s/001-algorithm.preset=rloo_seed=0",
        f"{tmp_path}/s/002-algorithm.preset=grpo_seed=1",
        f"{tmp_path}/s/003-algorithm.preset=rloo_seed=1",
    ]
    assert cli.main(["sweep", str(file), recipe, "--seeds", "0"]) == 2
    assert "--seeds 0: at least 1" in capsys.readouterr().err
    file.write_text("algorithm.preset=grpo seed=1\n")
    assert cli.main(["sweep", str(file), recipe, "--seeds", "2"]) == 2
    assert "'algorithm.preset=grpo seed=1' has a seed already" in capsys.readouterr().err
    file.write_text("algorithm.preset=grpos\n")
    assert cli.main(["sweep", str(file), recipe]) == 2
    assert "line 1 of the sweep (algorithm.preset=grpos)" in capsys.readouterr().err


def checked(recipe: Path, *words: str) -> tuple[str, ...]:
    return ("train", str(recipe), *words, "--check")


def test_a_run_that_fails_keeps_no_other_from_running(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path)
    runs = {
        "000-bad": checked(tmp_path / "no_such_recipe.yaml"),
        "001-good": checked(recipe, "trainer.steps=7"),
        "002-good": checked(recipe, "trainer.steps=8"),
    }
    said: list[str] = []
    sweep = LocalSweep(runs, at_once=2, say=said.append)
    assert sweep.run() == 2
    assert sweep.failed == {"000-bad": 2}
    heads = [line.partition(";")[0] for line in said if line.startswith("---")]
    assert heads[:2] == ["--- 000-bad starts", "--- 001-good starts"]  # two at a time
    assert set(heads[2:]) == {
        "--- 000-bad FAILED with exit code 2",
        "--- 001-good ended",
        "--- 002-good starts",
        "--- 002-good ended",
    }
    assert sum("3 of 3 done, about 0 min" in line for line in said) == 1
    assert any(line.startswith("[000] ") and "no_such_recipe.yaml" in line for line in said)
    assert "[001]   steps: 7" in said
    assert "[002]   steps: 8" in said
    assert capfd.readouterr().out == ""  # apart, each line with its number
    assert LocalSweep({"000-good": runs["001-good"]}, at_once=1, say=said.append).run() == 0
    assert "\n  steps: 7\n" in capfd.readouterr().out  # one at a time: as it prints it


def test_a_signal_is_passed_on_and_ends_the_sweep(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    write_recipe(folder).rename(folder / "recipe.yaml")
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("[000]"):  # it is running
            os.kill(os.getpid(), signal.SIGTERM)

    forever = ("status", str(folder), "--follow", "1")
    runs = {"000-first": forever, "001-second": forever, "002-third": forever}
    assert LocalSweep(runs, at_once=2, say=say).run() == 128 + signal.SIGTERM
    assert not any("002" in line for line in said)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_signal_that_comes_while_a_run_is_started_ends_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(subprocess.Popen[str]):
        def __init__(self, command: list[str], **options: Any) -> None:
            super().__init__([sys.executable, "-c", "import time; time.sleep(30)"], **options)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(local_sweep.subprocess, "Popen", Interrupted)
    sweep, begin = LocalSweep({"000-first": (), "001-second": ()}, at_once=1, say=lambda line: None), time.monotonic()
    assert sweep.run() == 128 + signal.SIGTERM
    assert sweep.failed == {"000-first": 128 + signal.SIGTERM}
    assert time.monotonic() - begin < 20


def test_runs_end_with_a_sweep_that_is_killed(tmp_path: Path) -> None:
    run = tmp_path / "run"  # in the place of Python
    run.write_text("#!/bin/sh\necho runs $$\nexec sleep 60\n")
    run.chmod(0o755)
    program = (
        "import sys; from megatron_rl.launch.local_sweep import LocalSweep\n"
        f"sys.executable = {str(run)!r}; LocalSweep({{'000-first': ()}}, at_once=2).run()"
    )
    with subprocess.Popen([sys.executable, "-uc", program], stdout=subprocess.PIPE, text=True) as sweep:
        assert sweep.stdout is not None
        number = next(int(line.split()[-1]) for line in sweep.stdout if line.startswith("[000] runs"))
        began = process.started(number)
        assert began is not None
        sweep.kill()
    deadline = time.monotonic() + 20
    while process.started(number) == began and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.started(number) != began
