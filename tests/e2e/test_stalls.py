"""A rank that stops in the middle of a phase: the run ends by itself, says which rank and where, and leaves nothing."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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


@dataclass
class Stalled:
    """A job that has ended, and what was seen of it before."""

    job: Job
    ranks: dict[int, int]  # their process ids
    port: str | None
    code: int
    seconds: float  # from the stop of a rank to the end


@pytest.fixture(scope="module")
def stalls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stalled]:
    """By phase. A job starts while the one before it waits for its deadline."""
    ending = {}
    with ThreadPoolExecutor() as pool:
        for phase, rank in STALLS:
            job = stalled_job(tmp_path_factory.mktemp(phase), phase, rank)
            job.wait_for(lambda job=job: len(job.ranks()) == 2)
            ranks = job.ranks()
            port = variable(ranks[0], "MASTER_PORT")
            job.wait_for(lambda pid=ranks[rank]: state(pid) == "T")
            ending[phase] = pool.submit(until_the_end, job, ranks, port)
    return {phase: ended.result() for phase, ended in ending.items()}


def until_the_end(job: Job, ranks: dict[int, int], port: str | None) -> Stalled:
    stopped = time.monotonic()
    return Stalled(job, ranks, port, job.finish(), time.monotonic() - stopped)


@pytest.mark.engine
@pytest.mark.parametrize(("phase", "rank"), STALLS)
def test_a_stopped_rank_is_named_with_its_phase(stalls: dict[str, Stalled], phase: str, rank: int) -> None:
    stalled = stalls[phase]
    job, ranks = stalled.job, stalled.ranks
    assert stalled.code == exit_codes.STALLED
    assert stalled.seconds < DEADLINE + GRACE
    assert processes_of(job.run_dir) == []
    assert segments(stalled.port) == []
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
    assert "megatron_rl/trainer/rank/main.py" in (folder / f"rank_{1 - rank}.txt").read_text(), (
        "the main thread's stack"
    )
    assert not (folder / f"rank_{rank}.json").exists(), "a stopped process writes nothing"
