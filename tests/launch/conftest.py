from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from .cluster import Cluster, missing_programs


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
        yield cluster
    finally:
        cluster.stop()
