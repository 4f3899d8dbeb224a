"""Signals in a command's first seconds, standard streams that take nothing, other locales: exit codes and messages."""

from __future__ import annotations

import os
import pty
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.runtime import spawn
from tests.e2e.job import write_recipe
from tests.fuzz.signals import CODES, COMMAND, IMPORTED, RANK, Strike, strike


@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_a_signal_at_any_moment_ends_a_run_with_its_own_exit_code(tmp_path: Path, number: signal.Signals) -> None:
    moments = random.Random(number)
    for k in range(2):
        assert strike(tmp_path / str(k), Strike(number, moments.uniform(0, 1.2))) == []


def test_a_signal_to_a_rank_that_has_no_handlers_yet_waits_until_it_has(tmp_path: Path) -> None:
    sender = "import os, sys, time; os.kill(os.getppid(), 10); time.sleep(60)"
    (tmp_path / "rank.py").write_text(
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sender!r}]); {RANK}"
    )
    outcome = spawn.run_ranks([sys.executable, str(tmp_path / "rank.py")], 1, tmp_path)
    assert outcome.code == 75


def test_a_signal_waits_while_a_command_of_torchruns_becomes_the_rank(tmp_path: Path) -> None:
    become = "import os, signal, sys; from megatron_rl.runtime import stop\nstop.hold_back()\n"
    become += "os.kill(os.getpid(), signal.SIGUSR1)\nos.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
    assert subprocess.run([sys.executable, "-c", become, RANK], timeout=60).returncode == 75


def launch(folder: Path, rank: str = RANK) -> list[str]:
    """The command of a run whose ranks run `rank`."""
    recipe = write_recipe(folder)
    (folder / "rank.py").write_text(rank)
    (folder / "imported.py").write_text(IMPORTED)
    return [sys.executable, "-c", COMMAND, "train", str(recipe), str(folder)]


def test_a_closed_terminal_ends_a_run_with_the_code_of_its_signal(tmp_path: Path) -> None:
    command = launch(tmp_path)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(command[0], command)
    said = b""
    while b"logs in" not in said:
        said += os.read(terminal, 1000)
    time.sleep(0.3)
    os.close(terminal)  # the kernel sends SIGHUP
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP


GOOD = "import time; from megatron_rl.runtime import stop; stop.let_through(); print('the rank speaks', flush=True)\n"


@pytest.mark.parametrize("redirect", ["2>&- >&- <&-", ">/dev/full 2>/dev/full"])
def test_a_run_goes_on_without_standard_streams(tmp_path: Path, redirect: str) -> None:
    command = launch(tmp_path, GOOD)
    done = subprocess.run(
        ["bash", "-c", f'"$@" {redirect}', "bash", *command], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert (tmp_path / "run" / "logs" / "attempt_1" / "rank_0.log").read_text() == "the rank speaks\n"


def test_a_failure_without_standard_streams_has_its_own_code(tmp_path: Path) -> None:
    command = launch(tmp_path, GOOD + "raise SystemExit(7)")
    done = subprocess.run(["bash", "-c", '"$@" >&- 2>&-', "bash", *command], timeout=60)
    assert done.returncode == 7


def test_a_locale_without_utf8_changes_neither_paths_nor_output(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "ü")
    environment = {**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "megatron_rl", "train", str(recipe), "--check"]
    done = subprocess.run(command, capture_output=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"run_dir: {tmp_path}/ü/run\n" in done.stdout.decode()
