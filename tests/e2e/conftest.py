from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron_rl.config import check, load_recipe, to_yaml
from megatron_rl.runtime.attempts import new_attempt, rank_environment
from tests.warm import run_ranks

from . import inside
from .job import Job, listening_at, mapped, processes_of, segments, variable, write_recipe

# An estimator with a state, a reference policy, several updates per step, a warm-up that is saved: what a resume has to bring
# back.
STATEFUL = (
    "algorithm.preset=awpo",
    "algorithm.kl.coef=0.01",
    "checkpoint.sft_every=10",
    "logging.record_every=2",
    "logging.samples_per_step=32",
)


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


VARIANTS_OVERRIDES = (
    *("checkpoint.every=0", "trainer.steps=1000", "trainer.eval_every=0", "sft.steps=60", "sft.log_every=1"),
    *("seed=5", "actor.optimizer.lr=3e-4"),  # at 1e-3 some step has nothing to learn
    *("logging.record_every=1", "logging.samples_per_step=1000"),
)


@pytest.fixture(scope="session")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the one run that `inside` makes, a step per variant."""
    folder = tmp_path_factory.mktemp("presets")
    run_dir = folder / "run"
    run_dir.mkdir()
    (run_dir / "recipe.yaml").write_text(to_yaml(check(load_recipe(write_recipe(folder), VARIANTS_OVERRIDES))))
    environment = {**rank_environment(0), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    outcome = run_ranks([sys.executable, str(inside.__file__), str(run_dir)], 2, new_attempt(run_dir), environment)
    assert outcome.code == 0, outcome.message
    return run_dir
