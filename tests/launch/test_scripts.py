"""What the batch scripts make of a job, written down: srun's command line and the meeting point, for 1, 2 and 32 nodes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from megatron_rl.config import load_recipe, to_yaml
from megatron_rl.report.status import read_status
from megatron_rl.runtime.attempts import new_attempt
from megatron_rl.runtime.owner import Ownership

from .batch import Batch, compare
from .jobs import REPOSITORY, write_recipe


@pytest.mark.parametrize("nodes", [1, 2, 32])
def test_train(tmp_path: Path, nodes: int) -> None:
    large = ("trainer.prompts_per_step=512", "sft.batch_size=256")  # a share for every one of 256 ranks
    batch = Batch(tmp_path, "recipe", "train", str(write_recipe(tmp_path)), *large, nodes=nodes)
    assert batch.code == 0, batch.stderr
    compare(f"train_{nodes}.txt", batch.record)


def test_what_the_job_was_given_beats_the_site(tmp_path: Path) -> None:
    given = {"SLURM_NTASKS_PER_NODE": "1", "SLURM_CPUS_PER_TASK": "4", "SLURM_GPUS_ON_NODE": "1"}
    batch = Batch(tmp_path, "recipe", "train", str(write_recipe(tmp_path)), **given)
    assert batch.code == 0, batch.stderr
    assert "\n--ntasks=1\n--ntasks-per-node=1\n" in batch.record
    assert "\n--cpus-per-task=4\n" in batch.record
    assert "1 nodes (gpu[003-003]) x 1, from step none" in batch.stderr


@pytest.mark.parametrize(
    ("end", "seconds"),
    [
        ("$(date -d '+600 sec' +%FT%T)", range(545, 557)),
        ("$(date -d '+40 sec' +%FT%T)", range(20, 31)),  # a short notice is not given up at once
        ("Unknown", range(10**9, 10**10)),
        ("", range(10**9, 10**10)),  # the controller does not answer
    ],
)
def test_how_long_ranks_may_take_to_obey(tmp_path: Path, end: str, seconds: range) -> None:
    (tmp_path / "job.sh").write_text(
        f'set -euo pipefail\nsource {REPOSITORY}/slurm/lib.sh\nSLURM_JOB_ID=7\ntrap "" USR1 USR2\n'
        f'scontrol() {{ [[ -n "{end}" ]] && echo "JobId=7 EndTime={end} StdOut=/x"; }}\n'
        f'sleep() {{ echo "$1" > {tmp_path}/seconds; }}\nRANKS=$$\nnotice TERM\nwait\n'
    )
    done = subprocess.run(["bash", str(tmp_path / "job.sh")], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    assert int((tmp_path / "seconds").read_text()) in seconds


@pytest.mark.parametrize(
    ("saved", "step"),
    [
        ([], "none"),
        (["sft/checkpoints/step_20", "sft/checkpoints/step_100"], "sft/100"),
        (["sft/checkpoints/step_100", "checkpoints/step_0", "checkpoints/previous_1"], "0"),
    ],
)
def test_a_warm_ups_checkpoint_is_progress(tmp_path: Path, saved: list[str], step: str) -> None:
    for name in saved:
        (tmp_path / name).mkdir(parents=True)
    script = f"set -euo pipefail; source {REPOSITORY}/slurm/lib.sh; RUN_DIR={tmp_path} newest_step"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == (step + "\n", 0), done.stderr


@pytest.mark.parametrize(
    "run_dir", ["runs/mine", "it's: #1", "a folder with spaces/" * 9 + "run", "it's a #1 folder/" * 9 + "run"]
)
def test_a_jobs_run_folder_is_that_of_the_recipe(run_dir: str, tmp_path: Path) -> None:
    recipe = to_yaml(load_recipe(write_recipe(tmp_path), [f"run_dir={run_dir}"]))
    script = f"set -euo pipefail; source {REPOSITORY}/slurm/lib.sh; run_dir_of"
    done = subprocess.run(["bash", "-c", script], input=recipe, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == (run_dir + "\n", 0), done.stderr


def test_train_in_a_container(tmp_path: Path) -> None:
    site = "CONTAINER_IMAGE=/images/rl.sqsh CONTAINER_MOUNTS=/lustre:/lustre\nSITE_SRUN=(--mpi=none)"
    # The check runs in the container, too; a stand-in for srun prints no recipe, and the job ends there.
    # What an attempt that was killed has left of its container is not run: the name is of this one.
    again = {"SLURM_RESTART_COUNT": "2"}
    batch = Batch(tmp_path, "recipe", "train", str(write_recipe(tmp_path)), nodes=2, site=site, **again)
    assert batch.code == 2
    compare("container.txt", batch.record)


@pytest.mark.parametrize(
    ("image", "modules", "said"), [("", True, "module load cuda/13.0"), ("", False, ""), ("x", True, "")]
)
def test_the_example_site_loads_a_toolkit_where_jobs_run_without_a_container(
    image: str, modules: bool, said: str
) -> None:
    """nvcc compiles kernels during a run; the node's is not the container's."""
    script = f"set -euo pipefail; source slurm/site.example.sh; CONTAINER_IMAGE={image}"
    script += '; module() { echo "module $*"; }' * modules + "; site_setup"
    variables = {"MEGATRON_RL_HOME": "/home", "PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "-c", script], cwd=REPOSITORY, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, said, "")


def test_torchrun(tmp_path: Path) -> None:
    batch = Batch(tmp_path, "recipe", "train", str(write_recipe(tmp_path)), nodes=2, site="LAUNCHER=torchrun")
    assert batch.code == 0, batch.stderr
    compare("torchrun_2.txt", batch.record)


# A task of srun's: what follows its options, with the variables that a step of two tasks gives the first of them.
TASK = """#!/usr/bin/env bash
while [[ $1 == -* ]]; do shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=1 SLURM_STEP_TASKS_PER_NODE=2
SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0 exec "$@"
"""


def test_a_job_that_is_refused_the_run_folder_is_no_attempt_of_the_run_in_it(tmp_path: Path) -> None:
    recipe, run_dir = str(write_recipe(tmp_path)), tmp_path / "run"
    running = Ownership(run_dir)
    running.take()
    (run_dir / "recipe.yaml").write_text("trainer: {steps: 10}\n")
    attempt = new_attempt(run_dir)
    (attempt / "submitted").write_text("the running job's line\n")
    try:
        batch = Batch(tmp_path, "recipe", "train", recipe, site="TASKS_PER_NODE=2", srun=TASK, SLURM_GPUS_ON_NODE="")
    finally:
        running.release()
    assert batch.code == 2
    assert "belongs to a running job" in batch.stderr
    refused = run_dir / "logs" / "attempt_2"
    assert f"belongs to a running job: process {os.getpid()}" in (refused / "refused").read_text()
    heartbeats = refused / "heartbeat"  # of ranks that srun has started before it ends them all
    heartbeats.mkdir()
    (heartbeats / "rank_1.json").write_text("{}")
    status = read_status(run_dir)
    assert (status.state, status.attempt, status.code) == ("starting", 1, None)


def test_a_missing_site_file_or_environment_is_named(tmp_path: Path) -> None:
    recipe = str(write_recipe(tmp_path))
    missing = Batch(tmp_path, "recipe", "train", recipe, MEGATRON_RL_SITE=str(tmp_path / "no.sh"))
    assert (missing.code, "copy slurm/site.example.sh" in missing.stderr) == (2, True)
    no_python = Batch(tmp_path, "recipe", "train", recipe, site="VENV=/nowhere")
    assert (no_python.code, "no /nowhere/bin/python" in no_python.stderr) == (1, True)
