"""A real Slurm with two nodes: jobs that train across both, are interrupted in every way Slurm has, and lose nothing."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.job import rows, variable
from safetensors.numpy import load_file

from megatron_rl.report.status import read_status

from .cluster import NODES, SPARE, Cluster, wait_until
from .jobs import REPOSITORY, SMALL, Job, assert_same_run, submit_refused, write_recipe, write_site

pytestmark = pytest.mark.slurm
STEPS = SMALL["trainer"]["steps"]


def ranks_on(cluster: Cluster, node: str) -> dict[int, int]:
    """Rank -> process id of the ranks that train on a node, by their command line."""
    found = {}
    for pid in cluster.processes_on(node):
        path = Path(f"/proc/{pid}/cmdline")
        words = path.read_bytes() if path.exists() else b""
        if (
            b"megatron_rl.trainer.rank.main" in words
            and b"multiprocessing" not in words
            and b"stand_in.py" not in words
            and b"torch.distributed" not in words
        ):
            found[int(variable(pid, "RANK") or -1)] = pid
    return found


@contextlib.contextmanager
def halted(cluster: Cluster) -> Iterator[None]:
    """Keeps the job on n1 where it is until Slurm has done what is to interrupt it."""
    (pid,) = ranks_on(cluster, "n1").values()
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def straight(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, dict[str, list[int]]]:
    """An uninterrupted job on two nodes, and the ranks that were seen on each of them."""
    folder = tmp_path_factory.mktemp("straight")
    job = Job(cluster, folder, "--nodes=2", "train", str(write_recipe(folder)))
    job.wait_for_step(1)
    seen = {node: list(ranks_on(cluster, node)) for node in NODES}
    job.finish()
    return job, seen


def test_one_job_trains_across_two_nodes(straight: tuple[Job, dict[str, list[int]]]) -> None:
    job, seen = straight
    assert seen == {"n1": [0], "n2": [1]}
    assert [row["step"] for row in rows(job.run_dir)] == list(range(STEPS + 1))
    logs = job.run_dir / "logs" / "attempt_1"
    assert {path.name for path in logs.glob("rank_*.log")} == {"rank_0.log", "rank_1.log"}
    assert f"step   {STEPS}" in (logs / "rank_0.log").read_text()
    assert [(start["job"], start["attempt"], start["step"], start["nodes"]) for start in job.starts] == [
        (job.number, "1", "none", "n[1-2]")
    ]


def test_time_limit_and_preemption_requeue_the_job_and_it_ends_with_the_same_bits(
    cluster: Cluster, tmp_path: Path, straight: tuple[Job, dict[str, list[int]]]
) -> None:
    job = Job(cluster, tmp_path, "--nodes=2", "train", str(write_recipe(tmp_path)))

    job.wait_for_step(1)  # Slurm looks at time limits twice a minute, and sends the notice where 180 s or less are left
    with halted(cluster):
        minutes = int(cluster.job(job.number)["RunTime"].split(":")[1])
        cluster.run("scontrol", "update", f"JobId={job.number}", f"TimeLimit={minutes + 3}")
        told = "SIGUSR1: asking the ranks to save and to stop"
        wait_until(lambda: told in cluster.output(job.number), 90, "the notice")
    wait_until(lambda: cluster.job(job.number)["Restarts"] == "1", 120, "the requeue")
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=30")
    job.wait_for_attempt(2)
    first_stop = int(job.starts[1]["step"])
    assert 1 <= first_stop < STEPS

    job.wait_for_step(first_stop + 1)
    with halted(cluster):
        end = cluster.job(job.number)["EndTime"]
        urgent = cluster.run(
            "sbatch",
            "--parsable",
            "--partition=urgent",
            "--nodes=2",
            "--exclusive",
            "--output=/dev/null",
            "--wrap=true",
        ).strip()
        wait_until(lambda: cluster.job(job.number)["EndTime"] != end, 60, "preemption")
    job.wait_for_attempt(3)
    assert cluster.state(urgent) == "COMPLETED"
    assert first_stop < int(job.starts[2]["step"]) < STEPS
    job.finish()

    assert [start["restart"] for start in job.starts] == ["0", "1", "2"]
    for attempt in (1, 2):
        logs = job.run_dir / "logs" / f"attempt_{attempt}"
        assert re.match(r"75 rank [01] on ", (logs / "end").read_text())
        assert "continues from step_" in (logs / "rank_0.log").read_text()
    assert not (job.run_dir / "logs" / "attempt_3" / "end").exists()
    assert_same_run(job.run_dir, straight[0].run_dir)


def test_a_job_of_one_task_that_is_told_to_end_before_it_can_save_is_requeued(cluster: Cluster, tmp_path: Path) -> None:
    site = write_site(tmp_path)  # of new processes, which are told while they import
    job = Job(cluster, tmp_path, "--nodes=1", "train", str(write_recipe(tmp_path)), site=site)

    def wait_for_rank() -> None:
        wait_until(lambda: any(ranks_on(cluster, node) for node in NODES), 120, lambda: cluster.output(job.number))

    wait_for_rank()
    cluster.run("scancel", "--signal=TERM", job.number)  # to the ranks, not to the batch script: as preemption does
    job.wait_for_attempt(2)
    wait_for_rank()
    urgent = cluster.run(
        *("sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    ).strip()
    job.wait_for_attempt(3)
    assert cluster.state(urgent) == "COMPLETED"
    wait_for_rank()
    cluster.run("scancel", job.number)
    job.finish("CANCELLED")
    wait_until(lambda: not any(ranks_on(cluster, node) for node in NODES), 60, "the end of the job's processes")
    ends = job.run_dir / "logs"
    wait_until((ends / "attempt_3" / "end").exists, 30, "the record of the last attempt's end")
    for attempt in (1, 2, 3):  # 75 where the rank was just fast enough
        assert re.match(r"(143|75) (rank 0|job \d+) on ", (ends / f"attempt_{attempt}" / "end").read_text())
    assert read_status(job.run_dir).state == "stopped"


def test_a_node_that_goes_down_costs_the_steps_since_the_last_checkpoint(
    cluster: Cluster, tmp_path: Path, straight: tuple[Job, dict[str, list[int]]]
) -> None:
    job = Job(cluster, tmp_path, "--nodes=2", "train", str(write_recipe(tmp_path)))
    job.wait_for_step(5)
    cluster.start_node(SPARE)
    with halted(cluster):
        cluster.power_off("n2")
    try:
        job.wait_for_attempt(2)
        assert not cluster.processes_on("n2")
        job.finish()
    finally:
        cluster.kill(SPARE)
        cluster.start_node("n2")
    first, second = job.starts
    assert (first["restart"], first["step"], first["nodes"]) == ("0", "none", "n[1-2]")
    assert (second["restart"], second["nodes"]) == ("1", "n[1,3]")
    assert int(second["step"]) >= 4
    assert_same_run(job.run_dir, straight[0].run_dir)


def test_a_persons_cancel_is_the_jobs_end(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, "--nodes=2", "train", str(write_recipe(tmp_path)))
    wait_until(lambda: ranks_on(cluster, "n1") and ranks_on(cluster, "n2"), 120, "ranks on both nodes")
    cluster.run("scancel", job.number)
    job.finish("CANCELLED")
    wait_until(lambda: not cluster.processes_on("n1"), 60, "the end of the job's processes")
    assert cluster.job(job.number)["Restarts"] == "0"
    assert "Slurm has decided" in cluster.output(job.number)


def test_ranks_of_a_node_are_neighbours_whatever_the_clusters_default(cluster: Cluster, tmp_path: Path) -> None:
    show = "import os; from megatron_rl.runtime.attempts import outer_world as w; v = w(os.environ).variables;"
    show += "print(v['RANK'], v['LOCAL_RANK'], os.environ['SLURMD_NODENAME'], v['MASTER_ADDR'], v['WORLD_SIZE'])"
    script = tmp_path / "job.sh"
    script.write_text(
        f"#!/usr/bin/env bash\nset -euo pipefail\nexport MEGATRON_RL_HOME={REPOSITORY} SLURM_DISTRIBUTION=cyclic\n"
        f"source {REPOSITORY}/slurm/lib.sh\nenter_home\nMASTER_ADDR=$(master_address)\nexport MASTER_ADDR\n"
        f'in_job 2 2 python -c "{show}"\n'
    )
    site = write_site(tmp_path, tasks_per_node=2)
    number = cluster.run(
        *("sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=2", f"--output={tmp_path}/out", str(script)),
        environment={"MEGATRON_RL_SITE": str(site)},
    ).strip()
    cluster.wait_for_state(number, "COMPLETED")
    assert sorted((tmp_path / "out").read_text().splitlines()) == [
        f"{rank} {rank % 2} n{1 + rank // 2} 127.0.0.1 4" for rank in range(4)
    ]


def test_a_sweep_runs_a_line_per_array_task(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "sweep.txt").write_text("# two seeds\nseed=11\nseed=12\n")
    recipe = write_recipe(tmp_path, trainer={**SMALL["trainer"], "steps": 1})
    job = Job(cluster, tmp_path, "sweep", str(tmp_path / "sweep.txt"), str(recipe))
    (tmp_path / "sweep.txt").write_text("seed=99\n")  # edited while the tasks wait
    for task, seed in enumerate((11, 12)):
        cluster.wait_for_state(f"{job.number}_{task}", "COMPLETED")
        folder = job.run_dir / f"00{task}-seed={seed}"
        assert f"\nseed: {seed}\n" in (folder / "recipe.yaml").read_text()
        assert rows(folder)[-1]["step"] == 1
        assert (folder / "logs" / "starts").read_text().split()[2] == f"{job.number}_{task}"


def test_a_chain_converts_trains_evaluates_and_exports(
    cluster: Cluster, tmp_path: Path, straight: tuple[Job, dict[str, list[int]]]
) -> None:
    recipe = write_recipe(tmp_path, trainer={**SMALL["trainer"], "steps": 2}, checkpoint={"every": 1})
    model = straight[0].run_dir / "export"
    chain = Job(cluster, tmp_path, "--nodes=2", "chain", str(recipe), "model.create=null", f"model.path={model}")
    jobs = dict(reversed(line.split()) for line in chain.number.splitlines() if "convert" not in line)
    numbers = [line.split()[0] for line in chain.number.splitlines()]
    assert [line.split()[1] for line in chain.number.splitlines()] == ["convert", "train", "evaluate", "convert"]
    for number, before in zip(numbers[1:], numbers, strict=False):
        assert cluster.job(number)["Dependency"].startswith(f"afterok:{before}")
    for number in numbers:
        cluster.wait_for_state(number, "COMPLETED")
    run = chain.run_dir
    assert cluster.job(jobs["train"])["NumNodes"] == "2"
    assert rows(run / "evaluation")[-1].keys() & {"eval/held_out/avg@1"}
    exported, trained, start = (
        load_file(folder / "model.safetensors") for folder in (run / "hf", run / "export", model)
    )
    assert exported.keys() == trained.keys()
    assert all((exported[name] == trained[name]).all() for name in trained)
    assert any((exported[name] != start[name]).any() for name in start)


def test_torchrun_on_every_node(cluster: Cluster, tmp_path: Path, straight: tuple[Job, dict[str, list[int]]]) -> None:
    site = write_site(tmp_path, launcher="torchrun", venv=cluster.venv)
    job = Job(cluster, tmp_path, "--nodes=2", "train", str(write_recipe(tmp_path)), site=site)
    job.wait_for_step(1)
    write_site(
        tmp_path, launcher="torchrun"
    )  # the second attempt is of new processes: with other hash seeds than the first
    with halted(cluster):  # the signal goes to the batch script, as before the time limit
        cluster.run("scancel", "--batch", "--signal=USR1", job.number)
        told = "SIGUSR1: asking the ranks to save and to stop"
        wait_until(lambda: told in cluster.output(job.number), 60, "the script's message")
    job.wait_for_attempt(2)
    assert 1 <= int(job.starts[1]["step"]) < STEPS
    job.finish()
    for attempt in (1, 2):
        logs = job.run_dir / "logs" / f"attempt_{attempt}"
        assert {path.name for path in logs.glob("rank_*.log")} == {"rank_0.log", "rank_1.log"}
    assert_same_run(job.run_dir, straight[0].run_dir)


def test_a_server_is_waited_for_and_ends_with_the_job_that_uses_it(cluster: Cluster, tmp_path: Path) -> None:
    site = write_site(tmp_path, extra="SERVER_LOOKS_EVERY=1")
    program = ("python", "tools/rubric_server.py", "--port", "{port}")
    server = Job(cluster, tmp_path, "serve", "--", *program, site=site)
    folder = REPOSITORY / "runs" / ".servers" / server.number
    judge = {"reward": "judge", "params": {"urls": "${oc.env:JUDGE_URL}", "model": "rubric"}}
    recipe = write_recipe(tmp_path, rewards={**SMALL["rewards"], "judge": judge})
    try:
        job = Job(cluster, tmp_path, f"--server=JUDGE_URL={server.number}/v1", "preflight", str(recipe), site=site)
        job.finish()
        output = cluster.output(job.number)
        assert re.search(rf"JUDGE_URL=http://127\.0\.0\.1:\d+/v1 \(job {server.number}\)", output)
        assert "checks in" in output
        assert ": fit" in output
        server.finish()
        assert f"the jobs that use this server ({job.number}) have ended" in cluster.output(server.number)
        assert not (folder / "url").exists()
        late = Job(cluster, tmp_path, "serve", "--", "false", site=site)
        late.finish("FAILED")
        gone = submit_refused(cluster, tmp_path, f"--server=JUDGE_URL={late.number}/v1", "train", str(recipe))
        assert f"job {late.number} is not in the queue any more" in gone
    finally:
        for number in (server.number, str(int(server.number) + 2)):
            shutil.rmtree(folder.with_name(number), ignore_errors=True)


def test_what_cannot_run_is_refused_before_it_waits_in_a_queue(cluster: Cluster, tmp_path: Path) -> None:
    recipe = str(write_recipe(tmp_path))
    assert "trainer.stepz" in submit_refused(cluster, tmp_path, "train", recipe, "trainer.stepz=1")
    assert "one word" in submit_refused(cluster, tmp_path, "--nodes", "2", "train", recipe)
    assert "submit.sh" in submit_refused(cluster, tmp_path, "tran", recipe)


def test_a_layout_that_does_not_fit_the_nodes_ends_the_job_before_any_rank_starts(
    cluster: Cluster, tmp_path: Path
) -> None:
    recipe = write_recipe(
        tmp_path,
        actor={**SMALL["actor"], "parallel": {"pipeline": 3}},
        model={**SMALL["model"], "create": {**SMALL["model"]["create"], "layers": 3}},
        launch={"processes": 3},
    )
    job = Job(cluster, tmp_path, "--nodes=2-2", "train", str(recipe))  # a range: submit.sh leaves the check to the job
    job.finish("FAILED")
    output = cluster.output(job.number)
    assert "2 nodes x 1 processes; nothing was started" in output
    assert "(2) must be a multiple of actor.parallel.tensor x pipeline" in output
    assert not job.run_dir.exists()
