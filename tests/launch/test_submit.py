"""What slurm/submit.sh refuses, and what it hands to sbatch, which is stood in for."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import jobs
from .jobs import REPOSITORY, write_recipe

SBATCH = """#!/usr/bin/env bash
echo "$MEGATRON_RL_SUBMITTED" > "$RECORD.submitted"
printf '%s\\n' "$@" >> "$RECORD"
echo 90000007
"""
SQUEUE = """#!/usr/bin/env bash
[[ $* != *--jobs=90000005* ]] || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }
echo 90000006
"""
SERVERS = REPOSITORY / "runs" / ".servers"


class Submission:
    """`code`, `stderr` and, as `words`, what sbatch was told."""

    def __init__(self, folder: Path, *arguments: str, site: str = "", **own: str) -> None:
        programs, record = folder / "bin", folder / "record"
        programs.mkdir(exist_ok=True)
        for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        record.unlink(missing_ok=True)
        (folder / "site.sh").write_text(f"VENV={jobs.VENV}\nTASKS_PER_NODE=8\nCPUS_PER_TASK=14\n{site}\n")
        variables = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "RECORD": str(record),
            "MEGATRON_RL_SITE": str(folder / "site.sh"),
        }
        done = subprocess.run(
            [str(REPOSITORY / "slurm" / "submit.sh"), *arguments],
            env=os.environ | variables | own,
            capture_output=True,
            text=True,
            timeout=120,
        )
        self.code, self.stdout, self.stderr = done.returncode, done.stdout, done.stderr
        self.words = record.read_text().splitlines() if record.exists() else []


@pytest.mark.parametrize(
    ("options", "site", "processes"),
    [
        ("", "", 8),
        ("--nodes=4", "SITE_SBATCH=(--nodes=2)", 32),
        ("", "SITE_SBATCH=(--nodes=2 --ntasks-per-node=3)", 16),  # submit.sh sets TASKS_PER_NODE after it
        ("-N 4 --ntasks-per-node=2", "", 8),
        ("-N4", "", 32),
    ],
)
def test_a_layout_that_does_not_fit_the_jobs_processes_is_refused(
    tmp_path: Path, options: str, site: str, processes: int
) -> None:
    recipe = str(write_recipe(tmp_path))
    done = Submission(tmp_path, *options.split(), "train", recipe, "rollout.tensor_parallel=7", site=site)
    assert (done.code, done.words) == (2, [])
    assert f"the number of processes ({processes}) must be a multiple of `rollout.tensor_parallel` (7)" in done.stderr


def test_sweeps_and_chains_are_checked_for_the_jobs_processes_too(tmp_path: Path) -> None:
    recipe, file = str(write_recipe(tmp_path)), tmp_path / "sweep.txt"
    file.write_text("seed=1\nrollout.tensor_parallel=7\n")
    swept = Submission(tmp_path, "--nodes=2", "sweep", str(file), recipe)
    assert (swept.code, swept.words) == (2, [])
    assert "line 2 of the sweep (rollout.tensor_parallel=7): the number of processes (16) must be" in swept.stderr
    chained = Submission(tmp_path, "--nodes=2", "chain", recipe, "rollout.tensor_parallel=7")
    assert (chained.code, chained.words) == (2, [])
    assert "the number of processes (16) must be" in chained.stderr


def test_where_slurm_chooses_the_nodes_the_job_checks_the_layout(tmp_path: Path) -> None:
    done = Submission(tmp_path, "--nodes=2-4", "train", str(write_recipe(tmp_path)))
    assert done.code == 0, done.stderr
    assert "the number of nodes is Slurm's choice" in done.stderr
    assert "--nodes=2-4" in done.words


def test_help_is_no_error(tmp_path: Path) -> None:
    done = Submission(tmp_path, "--help")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.startswith("slurm/submit.sh [sbatch options] train|sft|")
    refused = Submission(tmp_path, "trian")
    assert (refused.code, refused.stdout, refused.stderr) == (2, "", done.stdout)


def test_options_of_sbatch_are_handed_on(tmp_path: Path) -> None:
    recipe = str(write_recipe(tmp_path))
    large = ("trainer.prompts_per_step=512", "sft.batch_size=256")
    done = Submission(tmp_path, "--overcommit", "-H", "--no-kill", "-J", "mine", "train", recipe, *large)
    assert done.code == 0, done.stderr
    assert done.stderr == ""
    first = done.words.index("--overcommit")
    assert done.words[first : first + 5] == ["--overcommit", "-H", "--no-kill", "-J", "mine"]
    assert done.words[first + 5 :] == [str(REPOSITORY / "slurm" / "recipe.sbatch"), "train", recipe, *large]
    assert "--job-name=megatron-rl-train" in done.words[:first]  # before -J, so that it loses
    typed = f"cd {REPOSITORY} && slurm/submit.sh --overcommit -H --no-kill -J mine train {recipe} {' '.join(large)}"
    assert (tmp_path / "record.submitted").read_text() == typed + "\n"
    refused = Submission(tmp_path, "--nodes", "2", "train", recipe)
    assert (refused.code, refused.words) == (2, [])
    assert "write --nodes and its value as one word: --nodes=2" in refused.stderr


def test_a_sweep_is_submitted_without_warnings(tmp_path: Path) -> None:
    recipe, file = str(write_recipe(tmp_path)), tmp_path / "sweep.txt"
    file.write_text("seed=1\nseed=2\n")
    large = ("trainer.prompts_per_step=512", "sft.batch_size=256")
    done = Submission(tmp_path, "sweep", str(file), recipe, *large)
    assert (done.code, done.stderr) == (0, "")
    assert "--array=0-1" in done.words
    Path(done.words[done.words.index(str(REPOSITORY / "slurm" / "sweep.sbatch")) + 1]).unlink()  # the tasks' copy


@pytest.fixture
def server() -> Iterator[Path]:
    """The folder of a server's job 90000006, and of one that has ended, 90000005."""
    for number in ("90000005", "90000006"):
        (SERVERS / number).mkdir(parents=True)
    yield SERVERS / "90000006"
    for number in ("90000005", "90000006"):
        shutil.rmtree(SERVERS / number)


def test_a_job_that_uses_a_server_starts_after_it_and_is_known_to_it(tmp_path: Path, server: Path) -> None:
    recipe = str(write_recipe(tmp_path))
    judge = (
        "rewards.judge.reward=judge",
        "rewards.judge.params.model=m",
        "rewards.judge.params.urls=${oc.env:JUDGE_URL}",
    )
    words = ("train", recipe, "trainer.prompts_per_step=512", "sft.batch_size=256", *judge)
    assert "JUDGE_URL" in Submission(tmp_path, *words).stderr, "the recipe cannot be checked without an address"
    done = Submission(tmp_path, "--server=JUDGE_URL=90000006/v1", "--dependency=singleton", *words)
    assert done.code == 0, done.stderr
    assert "--dependency=singleton,after:90000006" in done.words
    assert (server / "clients").read_text() == "90000007\n"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("JUDGE_URL", "write the variable, the number of a job"),
        ("JUDGE_URL=90000004/v1", "job 90000004 was not submitted with"),
        ("JUDGE_URL=90000005/v1", "job 90000005 is not in the queue any more"),
    ],
)
def test_a_server_that_is_not_there_is_refused(tmp_path: Path, server: Path, option: str, message: str) -> None:
    done = Submission(tmp_path, f"--server={option}", "train", str(write_recipe(tmp_path)))
    assert (done.code, done.words) == (2, [])
    assert message in done.stderr
