from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.warm import python

from . import jobs
from .cluster import Cluster, missing_programs


def need(*programs: str) -> None:
    """Skips the test where a program is missing; in CI that is a failure."""
    missing = [name for name in programs if shutil.which(name) is None]
    if missing and os.environ.get("MEGATRON_RL_CI"):
        pytest.fail(f"no {', '.join(missing)}")
    if missing:
        pytest.skip(f"no {', '.join(missing)}")


@pytest.fixture(scope="session", autouse=True)
def checks_are_forks() -> Iterator[None]:
    """Where Slurm is stood in for: a check of a recipe takes a process of its own a second, and scripts make eighty."""
    with (
        tempfile.TemporaryDirectory(prefix="mrl-venv-", dir="/tmp") as folder,
        python(Path(folder, "venv")) as jobs.VENV,
    ):
        yield


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A real Slurm with two nodes. Where it cannot be had the tests are skipped, except in CI: there that is an error."""
    missing = missing_programs()
    problem = f"no {', '.join(missing)} (Debian: slurmctld slurmd slurm-client munge)" if missing else ""
    if not problem and os.geteuid() != 0:
        problem = "a Slurm of one's own needs root"
    if problem and os.environ.get("MEGATRON_RL_CI"):
        pytest.fail(problem)
    if problem:
        pytest.skip(problem)
    cluster = Cluster()
    try:
        cluster.start()
        with python(cluster.venv):
            yield cluster
    finally:
        cluster.stop()
