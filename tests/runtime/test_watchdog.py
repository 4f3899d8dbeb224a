"""Processes that hang in ways of their own, without torch: who is named, what is written, and that all end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from megatron_rl.config.schema import Config
from megatron_rl.runtime import exit_codes, postmortem
from megatron_rl.runtime.heartbeat import BETWEEN, Deadlines, Heartbeat
from megatron_rl.trainer.rank import attempt

LAUNCHER = """
import os, sys, time
from pathlib import Path
from megatron_rl.runtime import spawn
spawn._LOOK = 0.5
exec(os.environ.get("FAULTS", ""))
outcome = spawn.run_ranks([sys.executable, sys.argv[2]], int(sys.argv[3]), Path(sys.argv[1]), graces=spawn.Graces(stall=2.0))
print(outcome.message, file=sys.stderr)
sys.exit(outcome.code)
"""
RANK = """
import ctypes, os, signal, sys, time
from pathlib import Path
from megatron_rl.runtime import stop
from megatron_rl.runtime.heartbeat import HEARTBEAT, Deadlines
from megatron_rl.runtime.watchdog import Watchdog
stop.let_through()
exec(os.environ.get("FAULTS", ""))
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
watchdog = Watchdog(Path(os.environ["MEGATRON_RL_ATTEMPT"]), rank, world, Deadlines(60.0, {"reward": 4.0, "update": 8.0}))
watchdog.start()
HEARTBEAT.begin("RL", 0, 5)
HEARTBEAT.step = 3
def phase(name):
    HEARTBEAT.enter(name)
    HEARTBEAT.samples = ["sums-17"]
    time.sleep(1.2)  # a heartbeat
"""


# For launcher and ranks: the system clock steps on by two hours every 1.3 s, and fsync takes 3.3 s.
FAULTS = """
import threading
real_time, real_fsync = time.time, os.fsync
time.time = lambda: real_time() + 7200 * int(time.monotonic() / 1.3)
def slow(fd):
    time.sleep(0 if threading.current_thread() is threading.main_thread() else 3.3)
    real_fsync(fd)
os.fsync = slow
if "spawn" in globals():
    spawn._LOOK = 0.02
"""


def stall(folder: Path, script: str, ranks: int = 2, faults: str = "") -> tuple[int, str, Path]:
    """Exit code, what the launcher said, and the post-mortem folder."""
    attempt = folder / "run" / "logs" / "attempt_1"
    attempt.mkdir(parents=True)
    (folder / "rank.py").write_text(RANK + textwrap.dedent(script))
    command = [sys.executable, "-c", LAUNCHER, str(attempt), str(folder / "rank.py"), str(ranks)]
    started = time.monotonic()
    environment = {**os.environ, "FAULTS": faults}
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment)
    assert time.monotonic() - started < 45
    return done.returncode, done.stderr, postmortem.folder_of(attempt)


def test_a_rank_whose_c_code_holds_pythons_lock_is_named_and_leaves_its_stacks(tmp_path: Path) -> None:
    code, said, folder = stall(
        tmp_path,
        """
        phase("reward")
        if rank == 1:
            ctypes.PyDLL(None).sleep(60)  # PyDLL does not release the lock
        time.sleep(60)
        """,
        faults=FAULTS,
    )
    assert code == exit_codes.STALLED
    assert "rank 1 (node " in said.splitlines()[0]
    assert "is behind: in `reward` of RL step 3" in said.splitlines()[0]
    assert "something holds the GIL" in said
    assert 'rank.py", line' in (folder / "rank_1.txt").read_text(), "written by a signal handler that needs no lock"
    facts = json.loads((folder / "rank_0.json").read_text())
    assert facts["samples"] == ["sums-17"]
    assert "rank.py" in facts["at"]


def test_a_rank_that_answers_from_an_earlier_phase_is_the_one_behind(tmp_path: Path) -> None:
    code, said, folder = stall(
        tmp_path,
        """
        phase("reward")
        def loop_forever():
            while True:
                time.sleep(0.1)
        if rank == 2:
            loop_forever()
        HEARTBEAT.leave()
        phase("update")
        time.sleep(60)
        """,
        ranks=3,
    )
    assert code == exit_codes.STALLED
    first, second, *_ = said.splitlines()
    assert "rank 2 (node " in first
    assert "is behind: in `reward` of RL step 3" in first
    assert "in loop_forever" in first
    assert "ranks 0-1 wait in `update` of step 3" in second
    assert {path.name for path in folder.glob("rank_*.json")} == {f"rank_{rank}.json" for rank in range(3)}


def test_where_no_rank_is_left_to_say_so_the_launcher_does(tmp_path: Path) -> None:
    code, said, folder = stall(tmp_path, 'phase("reward")\nos.kill(os.getpid(), signal.SIGSTOP)\n', ranks=2)
    assert code == exit_codes.STALLED
    for rank in (0, 1):
        assert f"rank {rank} (node " in said
    assert said.count("is behind: in `reward` of RL step 3") == 2
    assert said.count("its process is stopped") == 2
    assert "the run hung: rank " in (folder / postmortem.REPORT).read_text()
    assert (tmp_path / "run/logs/attempt_1/end").read_text().startswith(f"{exit_codes.STALLED} rank ")


def test_a_run_within_its_deadlines_is_left_alone_by_a_slow_disk_and_a_clock_that_is_set(tmp_path: Path) -> None:
    code, said, folder = stall(
        tmp_path,
        'for _ in range(5):\n    phase("reward")\n    HEARTBEAT.leave()\nwatchdog.stop()\n',
        faults=FAULTS,
    )
    assert (code, said.strip()) == (0, "")
    assert not folder.exists()
    stacks = sorted((tmp_path / "run/logs/attempt_1/heartbeat").glob("*.stacks"))
    assert [path.name for path in stacks] == ["rank_0.stacks", "rank_1.stacks"]
    assert [path.read_text() for path in stacks] == ["", ""], (
        "the frames of a healthy rank were read without Python's lock"
    )


# ---------------------------------------------------------------------------------------------------- pure parts
def test_the_first_time_of_a_phase_may_take_longer_and_an_outer_phase_is_watched_too(tmp_path: Path) -> None:
    progress = Heartbeat()
    progress.attach(tmp_path, 0, 1, Deadlines(100.0, {"update": 0.0, "estimate": 0.0}, first=50.0))
    progress.begin("RL", 0, 1)
    progress.enter("update")
    assert progress.overdue() is None
    progress.leave()
    progress.enter("update")
    time.sleep(0.01)
    assert progress.overdue() == ("update", 0.0)
    progress.leave()
    assert progress.overdue() is None
    assert progress.phase == BETWEEN
    for _ in range(2):
        progress.enter("estimate")
        progress.enter("reward")
        late = progress.overdue()
        progress.leave()
        progress.leave()
    assert late == ("estimate", 0.0), "the outer phase's deadline holds while an inner one runs"


def beat(rank: int, **changes: object) -> dict[str, object]:
    return {
        "rank": rank,
        "world": 4,
        "host": f"n{rank // 2}",
        "pid": 100 + rank,
        "seconds": 10.0,
        "beat": 5,
        "stage": "RL",
        "step": 7,
        "phase": "update",
        "entered": 40,
        "at": "somewhere",
    } | changes


STALL = {"rank": 0, "phase": "update", "limit": 120.0, "why": ""}


def test_ranks_in_the_same_phase_are_told_apart_by_the_collective_they_wait_in() -> None:
    dumps = {rank: beat(rank, pending="all_reduce 9 of [0, 1, 2, 3]") for rank in (0, 1, 3)}
    dumps[2] = beat(2, at="megatron_rl/rewards/scorer.py:10 in score")
    text = postmortem.verdict(STALL, dumps, dumps, dumps, "n0")
    assert text.splitlines()[0].startswith("rank 2 (node n1, process 102) is behind: in `update` of RL step 7")
    assert "scorer.py:10" in text
    assert "ranks 0-1, 3 wait in `update` of step 7 (all_reduce 9 of [0, 1, 2, 3])" in text
    assert "the deadline that passed: 2 min for `update`, on rank 0" in text


def test_where_all_wait_for_the_same_nobody_is_accused() -> None:
    dumps = {rank: beat(rank, pending="all_reduce 9 of [0, 1, 2, 3]") for rank in range(4)}
    assert postmortem.verdict(STALL, dumps, dumps, dumps, "n0").startswith("no rank is behind: all 4 answer")


def test_a_rank_that_never_came_and_one_on_a_dead_node_are_both_named() -> None:
    beats = {rank: beat(rank) for rank in (0, 1, 3)}
    text = postmortem.verdict(STALL, beats, beats, {0: beats[0], 1: beats[1]}, "n0")
    assert "rank 3 (node n1, process 103) is behind" in text
    assert "its node or its process is stopped, dead or cut off" in text
    assert "rank 2 is behind: no heartbeat yet: it died or hung during start-up" in text


def test_nccl_ends_no_process_before_the_watchdog_has_spoken() -> None:
    config = Config(run_dir="")
    slowest = max(config.watchdog.phases.values()) + config.watchdog.first_time_minutes
    assert attempt.gpu_timeout_minutes(config) > slowest > config.launch.timeout_minutes
    config.launch.timeout_minutes = 1440.0
    assert attempt.gpu_timeout_minutes(config) == 1440.0
    config.launch.timeout_minutes, config.watchdog.enabled = 5.0, False
    assert attempt.gpu_timeout_minutes(config) == 5.0


@pytest.mark.parametrize(("numbers", "text"), [([0], "0"), ([0, 1, 2, 5], "0-2, 5"), ([3, 1], "1, 3")])
def test_ranges(numbers: list[int], text: str) -> None:
    assert postmortem._ranges(numbers) == text
