"""Submitting our scripts to the tests' cluster, and looking at what the jobs leave."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from e2e.job import CHAIN_SUM, RECIPE, rows, untimed

from .cluster import Cluster

REPOSITORY = Path(__file__).parents[2]
VENV = Path(sys.prefix)  # of scripts without a cluster; `conftest.checks_are_forks` has another
# Two nodes of one process each: a rollout engine per node, gradients summed over both; an estimator with a state.
SMALL: dict[str, Any] = {
    **RECIPE,
    "tasks": {**RECIPE["tasks"], "eval": {"held_out": {**CHAIN_SUM, "size": 8, "seed": 77}}},
    "algorithm": {"preset": "awpo"},
    "rollout": {**RECIPE["rollout"], "tensor_parallel": 1},
    "actor": {**RECIPE["actor"], "parallel": {"tensor": 1}},
    "sft": {**RECIPE["sft"], "steps": 20},
    "trainer": {**RECIPE["trainer"], "steps": 10, "eval_every": 5},
    "checkpoint": {"every": 4, "keep": 100},
}


def write_recipe(folder: Path, **sections: Any) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({**SMALL, "run_dir": str(folder / "run"), **sections}, sort_keys=False))
    return path


def write_site(
    folder: Path, tasks_per_node: int = 1, launcher: str = "srun", extra: str = "", venv: Path | str = sys.prefix
) -> Path:
    """A site file for the tests' cluster; by default with this interpreter's environment."""
    path = folder / "site.sh"
    path.write_text(
        f"SITE_SBATCH=(--partition=normal --time=30 --output={folder}/%x-%j.out)\n"
        f"TASKS_PER_NODE={tasks_per_node}\nCPUS_PER_TASK=1\nLAUNCHER={launcher}\nVENV={venv}\n{extra}\n"
    )
    return path


class Job:
    """A job of `slurm/submit.sh`, with the folder that its recipe, site file and output are in. Its ranks are forks unless
    the site file is another than its own."""

    def __init__(self, cluster: Cluster, folder: Path, *arguments: str, site: Path | None = None) -> None:
        self.cluster, self.folder, self.run_dir = cluster, folder, folder / "run"
        site = site or write_site(folder, venv=cluster.venv)
        self.number = cluster.run(
            *(str(REPOSITORY / "slurm" / "submit.sh"), "--parsable", *arguments),
            environment={"MEGATRON_RL_SITE": str(site)},
        ).strip()

    def wait_for_step(self, step: int, seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not any(row["step"] >= step for row in rows(self.run_dir)):
            self.cluster.wait_for_state(self.number, "RUNNING", "COMPLETING")
            assert time.monotonic() < deadline, f"no step {step}:\n{self.cluster.output(self.number)}"
            time.sleep(0.05)

    def wait_for_attempt(self, number: int, seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while len(self.starts) < number:
            self.cluster.wait_for_state(self.number, "PENDING", "RUNNING", "COMPLETING")
            self.cluster.wait_for_state(self.number, "RUNNING", "COMPLETING")
            assert time.monotonic() < deadline, f"no attempt {number}:\n{self.cluster.output(self.number)}"
            time.sleep(0.05)

    def finish(self, state: str = "COMPLETED") -> None:
        self.cluster.wait_for_state(self.number, state)

    @property
    def starts(self) -> list[dict[str, str]]:
        """One record per start: job, restart, attempt, step, nodes."""
        path = self.run_dir / "logs" / "starts"
        lines = path.read_text().splitlines() if path.exists() else []
        return [dict(zip(words[1::2], words[2::2], strict=True)) for words in map(str.split, lines)]


def assert_same_run(own: Path, want: Path) -> None:
    """Bit for bit: every metric that does not depend on the clock, and the final weights."""
    mine, theirs = [untimed(row) for row in rows(own)], [untimed(row) for row in rows(want)]
    assert [row["step"] for row in mine] == [row["step"] for row in theirs]
    for left, right in zip(mine, theirs, strict=True):
        assert left == right
    assert (own / "export" / "model.safetensors").read_bytes() == (want / "export" / "model.safetensors").read_bytes()


def submit_refused(cluster: Cluster, folder: Path, *arguments: str) -> str:
    """What `slurm/submit.sh` says when it does not submit."""
    done = subprocess.run(
        [str(REPOSITORY / "slurm" / "submit.sh"), *arguments],
        env=cluster.environment({"MEGATRON_RL_SITE": str(write_site(folder, venv=VENV))}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stdout
    assert "Submitted" not in done.stdout
    return done.stderr
