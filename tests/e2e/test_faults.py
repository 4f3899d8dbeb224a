"""What goes wrong from outside ends with one clear message, no process left, and nothing half-written taken for whole."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config import load_recipe
from megatron_rl.report.status import read_status

from .job import STOPPING, Job, processes_of, rows, segments, state, variable, write_recipe

ENDLESS = ("trainer.steps=100000", "trainer.eval_every=0", "checkpoint.keep=2")


def messages(stderr: str) -> list[str]:
    """What the command itself said on standard error: one entry per message, with its indented lines."""
    return [part for part in f"\n{stderr}".split("\nmegatron-rl: ")[1:] if part]


def checkpoints(job: Job) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (job.run_dir / "checkpoints").glob("step_*"))


def left(job: Job, port: str | None) -> list[Any]:
    """Processes and shared memory that a finished job has left behind."""
    deadline = time.monotonic() + 5
    while processes_of(job.run_dir) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [*processes_of(job.run_dir), *segments(port)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run, interrupted in one way after the other; each test continues where the last one ended."""
    return tmp_path_factory.mktemp("faults")


@pytest.mark.engine
def test_a_warm_up_that_a_batch_system_stops_is_saved(folder: Path) -> None:
    job = Job(folder, *ENDLESS)
    job.wait_for(lambda: bool(rows(job.run_dir, "sft/metrics.jsonl")))
    os.kill(job.process.pid, signal.SIGUSR1)
    assert job.finish() == 75
    done = rows(job.run_dir, "sft/metrics.jsonl")[-1]["step"]
    [saved] = (job.run_dir / "sft" / "checkpoints").iterdir()
    assert done <= int(saved.name.removeprefix("step_")) < done + 10
    assert (
        f"the same command continues from {saved.name} of the warm-up"
        in (job.run_dir / "logs" / "attempt_1" / "rank_0.log").read_text()
    )
    status = read_status(job.run_dir)
    assert (status.state, status.checkpoint) == ("stopped", f"{saved.name} of the warm-up")
    assert "starts over" not in str(status.continue_with)


@pytest.mark.engine
def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint_whole(folder: Path) -> None:
    job = Job(folder, *ENDLESS, "checkpoint.on_failure=stop")
    job.wait_for((job.run_dir / "owner.json").exists)
    second = Job(folder, *ENDLESS, "seed=8")  # long before the first one's ranks have read their recipe
    assert second.finish() == 2
    assert messages(second.stderr)[0].startswith(
        f"{job.run_dir} belongs to a running job: process {job.process.pid} on "
    )
    job.wait_for_checkpoint(1)
    assert " of the warm-up\nSFT: " in (job.run_dir / "logs" / "attempt_2" / "rank_0.log").read_text()
    recipes = [job.run_dir, job.run_dir / "logs" / "attempt_2"]
    assert [load_recipe(place / "recipe.yaml").seed for place in recipes] == [3, 3]
    ranks = job.ranks()
    port = variable(ranks[0], "MASTER_PORT")
    for pid in ranks.values():  # a file may grow to 100 kB from now on: what a full disk is to a process, without one
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    started = time.monotonic()
    assert job.finish() == 1
    assert time.monotonic() - started < 240
    assert left(job, port) == []
    [message] = messages(job.stderr)
    assert "CheckpointError: could not save" in message
    assert f"The last whole checkpoint is step_{checkpoints(job)[-1]}" in message
    assert "make room" in message
    assert "Traceback" not in job.stderr
    assert not list((job.run_dir / "checkpoints").glob(".step_*"))
    folders = (job.run_dir / "checkpoints").glob("step_*")
    assert all((path / "manifest.json").exists() for path in folders)


@pytest.mark.engine
def test_a_full_disk_costs_a_run_that_goes_on_only_the_save(folder: Path) -> None:
    job = Job(folder, *ENDLESS)
    before = checkpoints(job)[-1]
    job.wait_for_checkpoint(before + 1)
    ranks = job.ranks().values()
    for pid in ranks:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    job.wait_for(lambda: any(row.get("checkpoint/failed") for row in rows(job.run_dir)))
    failed = rows(job.run_dir)[-1]["step"]
    for pid in ranks:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    job.wait_for(lambda: checkpoints(job)[-1] > failed)
    metrics = job.run_dir / "metrics.jsonl"
    job.wait_for(
        lambda: metrics.stat().st_size > 30_000
    )  # longer than the ranks' logs, which can still be written then
    for pid in ranks:  # not even a row of metrics.jsonl has room now
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (metrics.stat().st_size, resource.RLIM_INFINITY))
    assert job.finish() == 1
    assert "could not save" in job.stdout
    assert "training goes on" in job.stdout
    [message] = messages(job.stderr)
    assert "File too large" in message
    assert "Traceback" not in job.stderr


@pytest.mark.engine
def test_it_continues_after_that_and_ctrl_c_stops_it_in_order(folder: Path) -> None:
    before = max(row["step"] for row in rows(folder / "run"))
    job = Job(folder, *ENDLESS)
    last = checkpoints(job)[-1]
    job.wait_for_step(before + 1)
    port = variable(job.ranks()[0], "MASTER_PORT")
    os.kill(job.process.pid, signal.SIGINT)
    assert job.finish() == 130
    assert left(job, port) == []
    assert f"continuing after step {last}" in job.stdout
    assert "stopping after this step; press Ctrl-C again to stop at once" in job.stderr
    [message] = messages(job.stderr)
    done = rows(job.run_dir)[-1]["step"]
    assert "stopped by SIGINT" in message
    assert "Traceback" not in job.stderr
    assert checkpoints(job)[-1] == done, "what was learned is saved before it stops"
    assert [row["step"] for row in rows(job.run_dir)] == list(range(done + 1))


@pytest.mark.engine
def test_a_killed_rank_ends_the_run_within_seconds_and_is_named(folder: Path) -> None:
    done = rows(folder / "run")[-1]["step"]
    job = Job(folder, *ENDLESS)
    job.wait_for_step(done + 1)
    ranks = job.ranks()
    port = variable(ranks[0], "MASTER_PORT")
    os.kill(ranks[1], signal.SIGKILL)
    started = time.monotonic()
    assert job.finish() == 128 + signal.SIGKILL
    assert time.monotonic() - started < 120
    assert left(job, port) == []
    [message] = messages(job.stderr)
    assert re.match(r"rank 1 failed first, killed by SIGKILL (in `\w+`|between phases) of RL step \d+, ", message)
    for step in checkpoints(job):
        manifest = json.loads((job.run_dir / "checkpoints" / f"step_{step}" / "manifest.json").read_text())
        assert all((job.run_dir / "checkpoints" / f"step_{step}" / name).exists() for name in manifest["files"])


@pytest.mark.engine
def test_what_a_run_leaves_that_was_killed_in_its_engines_start_is_removed_by_the_next(tmp_path: Path) -> None:
    temporary = Path(tempfile.mkdtemp(prefix="killed-", dir="/tmp"))  # with a short path, as sockets need it
    try:
        overrides = ("sft.steps=0", "launch.preflight=off", f"algorithm.plugins=[{STOPPING}]")
        job = Job(tmp_path, *overrides, environment={"TMPDIR": str(temporary), "STOP": "engine start:0"})
        job.wait_for(lambda: len(job.ranks()) == 2)
        first = job.ranks()[0]
        port = variable(first, "MASTER_PORT")
        job.wait_for(lambda: state(first) == "T")  # just before the names go
        assert segments(port)  # once it is dead, a run that starts beside this test may remove them
        job.kill()
        assert [path for path in temporary.iterdir() if path.name.startswith("mrl-sockets-")]
        # The next start, however early it ends.
        code = "import sys; from pathlib import Path; from megatron_rl.runtime.spawn import run_ranks\n"
        code += "run_ranks(['true'], 1, Path(sys.argv[1]))"
        environment = {**os.environ, "TMPDIR": str(temporary)}
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment)
        assert segments(port) == []
        assert list(temporary.glob("mrl-sockets-*")) == []
    finally:
        shutil.rmtree(temporary)


BAD = {
    "wrong key": (["trainer.stepps=3"], "trainer.steps"),
    "wrong type": (["trainer.steps=many"], "trainer.steps"),
    "layout that does not divide": (["launch.processes=3"], "multiple"),
    "heads that do not divide": (["actor.parallel.tensor=3", "launch.processes=6"], "3"),
    "missing model folder": (["model.path=/nowhere/model"], "/nowhere/model"),
    "empty task": (["tasks.train.sums.size=0"], "tasks.train.sums"),
    "no task": (["tasks.train=null"], "tasks.train"),
    "group of one": (["algorithm.preset=shrinkage", "rollout.group_size=1"], "rollout.group_size"),
    "no steps": (["trainer.steps=0"], "trainer.steps"),
    "no room for the prompt": (["actor.tokens_per_microbatch=8"], "actor.tokens_per_microbatch"),
    "unknown preset": (["algorithm.preset=grpoo"], "grpo"),
    "a checkpoint that is not there": (["--resume", "/nowhere/step_3"], "/nowhere/step_3"),
}


# Commands one after the other, in one new process, with the seconds of a processor that each took, the first with imports.
COMMANDS = """
import contextlib, io, json, sys, time
begin, refused = 0.0, []
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        import megatron_rl.__main__ as entry
        code = entry.command(words)
    end = time.process_time()
    refused.append([code, out.getvalue(), err.getvalue(), end - begin])
    begin = end
print(json.dumps([refused, sorted(sys.modules)]))
"""


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str, float]]:
    """Of each command: the exit code, what it said, and seconds of a processor."""
    folders = {name: tmp_path_factory.mktemp("bad") for name in BAD}
    words = [["train", str(write_recipe(folders[name])), *overrides] for name, (overrides, _) in BAD.items()]
    command = [sys.executable, "-c", COMMANDS, json.dumps(words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    found, modules = json.loads(done.stdout)
    assert "torch" not in modules
    assert [name for name, folder in folders.items() if (folder / "run").exists()] == []
    return dict(zip(BAD, found, strict=True))


@pytest.mark.parametrize("name", BAD)
def test_a_bad_recipe_is_refused_at_once_with_one_message(
    refused: dict[str, tuple[int, str, str, float]], name: str
) -> None:
    code, out, err, seconds = refused[name]
    assert (code, out) == (2, "")
    [message] = messages(err)
    assert BAD[name][1] in message
    assert "Traceback" not in err
    assert seconds < 2, "under one when idle"


def test_an_empty_prompt_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    job = Job(tmp_path, "tasks.eval.held_out.source=jsonl", f"tasks.eval.held_out.path={tmp_path / 'empty.jsonl'}")
    assert job.finish() == 2
    assert "empty.jsonl" in job.stderr or "held_out" in job.stderr
    assert "Traceback" not in job.stderr


@pytest.mark.engine
def test_what_only_the_data_shows_is_refused_by_the_ranks_with_one_message(tmp_path: Path) -> None:
    job = Job(tmp_path, "rollout.max_prompt_tokens=4")
    assert job.finish() == 2
    assert processes_of(job.run_dir) == []
    [message] = messages(job.stderr)
    assert "rollout.max_prompt_tokens" in message
    assert "Traceback" not in job.stderr


def test_the_recipe_of_these_tests_is_a_good_one(tmp_path: Path) -> None:
    from megatron_rl.cli import main

    assert main(["train", str(write_recipe(tmp_path)), "--check"]) == 0
