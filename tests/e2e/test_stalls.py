"""A rank that stops in the middle of a phase: the run ends by itself, says which rank and where, and leaves nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from megatron_rl.runtime import exit_codes

from .job import STOPPING, Job, processes_of, segments, state, variable

DEADLINE = 6.0  # seconds
GRACE = 25.0  # seconds until the report is there and everything has ended, on a busy machine
# phase, and the rank that is stopped in it
STALLS = (
    *(("generate", 1), ("reward", 0), ("old_log_prob", 1), ("update", 0)),
    *(("checkpoint", 1), ("sync", 1), ("evaluate", 0)),
)


def stalled_job(folder: Path, phase: str, rank: int) -> Job:
    timed = ("generate", "evaluate", "update", "checkpoint")
    return Job(
        folder,
        *("sft.steps=0", "trainer.eval_every=1", f"algorithm.plugins=[{STOPPING}]"),
        *("launch.preflight=off", "watchdog.first_time_minutes=0", f"watchdog.default_minutes={DEADLINE / 60}"),
        *(f"watchdog.phases.{name}={DEADLINE / 60}" for name in timed),
        environment={"STOP": f"{phase}:{rank}"},
    )


@pytest.mark.engine
@pytest.mark.parametrize(("phase", "rank"), STALLS)
def test_a_stopped_rank_is_named_with_its_phase(tmp_path: Path, phase: str, rank: int) -> None:
    job = stalled_job(tmp_path, phase, rank)
    job.wait_for(lambda: len(job.ranks()) == 2)
    ranks = job.ranks()
    port = variable(ranks[0], "MASTER_PORT")
    job.wait_for(lambda: state(ranks[rank]) == "T")
    stopped = time.monotonic()
    assert job.finish() == exit_codes.STALLED
    assert time.monotonic() - stopped < DEADLINE + GRACE
    assert processes_of(job.run_dir) == []
    assert segments(port) == []
    lines = job.stderr.split("megatron-rl: the run hung: ")[1].splitlines()
    assert lines[0].startswith(f"rank {rank} (node ")
    assert f"process {ranks[rank]}) is behind: in `{phase}` of RL step " in lines[0]
    assert "its process is stopped" in lines[0]
    assert lines[1].strip().startswith(f"rank {1 - rank} waits in ")
    assert "Traceback" not in job.stderr

    folder = job.run_dir / "postmortem" / "attempt_1"
    assert (folder / "report.txt").read_text().splitlines()[0] == f"the run hung: {lines[0]}"
    other = json.loads((folder / f"rank_{1 - rank}.json").read_text())
    assert other["collectives"], "what torch's flight recorder has"
    assert other["samples"] or phase not in ("generate", "reward")
    assert other["memory_gib"]["host, this process"] > 0.01
    assert "megatron_rl/trainer/main.py" in (folder / f"rank_{1 - rank}.txt").read_text(), "the main thread's stack"
    assert not (folder / f"rank_{rank}.json").exists(), "a stopped process writes nothing"
