from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from .job import Job, listening_at, mapped, processes_of, segments, variable

# An estimator with a state, a reference policy, several updates per step, a warm-up that is saved: what a resume has to bring
# back.
STATEFUL = ("algorithm.preset=awpo", "algorithm.kl.coef=0.01", "checkpoint.sft_every=10", "logging.record_every=2")


@pytest.fixture(autouse=True)
def no_job_outlives_its_test() -> Iterator[None]:
    yield
    Job.end_all()


@dataclass
class Finished:
    """A run that was left to end, and what was seen of it from outside."""

    run_dir: Path
    code: int
    stdout: str
    stderr: str
    pids: list[int] = field(default_factory=list)
    left_processes: list[int] = field(default_factory=list)
    listening: list[str] = field(default_factory=list)  # addresses at which the ranks listened while it ran
    segments: list[Path] = field(default_factory=list)  # under /dev/shm, while it ran and after
    sockets: list[Path] = field(default_factory=list)  # in the temporary folder, after
    mapped: list[str] = field(default_factory=list)  # under /dev/shm, by rank 0 while it ran


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Four steps without interruption, tensor parallel 2, of new processes."""
    temporary = Path(tempfile.mkdtemp(prefix="straight-"))  # with a short path, as sockets need it
    job = Job(
        tmp_path_factory.mktemp("straight"),
        *(*STATEFUL, "logging.report=true"),
        environment={"TMPDIR": str(temporary)},
        is_new=True,
    )
    job.wait_for_step(0)
    ranks = job.ranks()
    port = variable(ranks[0], "MASTER_PORT")
    named, maps = segments(port), mapped(ranks[0])
    listening = [address for pid in ranks.values() for address in listening_at(pid)]
    code = job.finish()
    time.sleep(0.2)
    left, named = processes_of(job.run_dir), named + segments(port)
    sockets = [path for path in temporary.rglob("*") if path.is_socket()]
    sockets += list(temporary.glob("mrl-sockets-*"))  # the folder they lie in
    shutil.rmtree(temporary)
    return Finished(job.run_dir, code, job.stdout, job.stderr, [*ranks.values()], left, listening, named, sockets, maps)
