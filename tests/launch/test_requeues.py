"""How a job's script answers its end, a signal or a lost node: with a requeue, or for good."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.runtime import exit_codes

from .batch import Batch
from .jobs import REPOSITORY, write_recipe


def test_the_last_task_of_an_array_requeues_itself_and_not_the_array(tmp_path: Path) -> None:
    (tmp_path / "sweep.txt").write_text("seed=1\n'seed=2' # last\n")
    recipe, file = str(write_recipe(tmp_path)), str(tmp_path / "sweep.txt")
    array = {"SLURM_ARRAY_JOB_ID": "1234", "SLURM_ARRAY_TASK_ID": "1"}  # the task's SLURM_JOB_ID is the whole array's
    array["MEGATRON_RL_SUBMITTED"] = "slurm/submit.sh --nodes=2 sweep FILE RECIPE"
    batch = Batch(tmp_path, "sweep", file, recipe, SRUN_EXIT="75", **array)
    assert "scontrol requeue 1234_1\n" in batch.record
    assert "\nseed=2\n" in batch.record
    assert "\nrun_dir=FOLDER/run/001-_seed=2_\n" in batch.record
    logs = tmp_path / "run" / "001-_seed=2_" / "logs"
    assert (logs / "starts").exists()
    assert (logs / "attempt_1" / "submitted").read_text() == "slurm/submit.sh --nodes=2 --array=1 sweep FILE RECIPE\n"
    assert (logs / "attempt_1" / "requeued").read_text() == "1234_1\n"


def documented_answers() -> dict[int, str]:
    """Exit code -> answer, as docs/slurm.md has them."""
    table = (REPOSITORY / "docs" / "slurm.md").read_text().partition("| exit code | what it says | answer |")[2]
    rows = [[cell.strip() for cell in row.split("|")[1:4]] for row in table.partition("\n\n")[0].splitlines()[2:]]
    return {int(code): answer for codes, _, answer in rows for code in codes.split(",")}


def test_the_answer_to_every_exit_code_is_the_documented_one() -> None:
    own = {value for name, value in vars(exit_codes).items() if name.isupper()}
    documented = documented_answers()
    assert own <= documented.keys()
    named = (signal.SIGHUP, signal.SIGINT, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGKILL, signal.SIGSEGV)
    assert {128 + number for number in (*named, signal.SIGTERM, signal.SIGUSR1)} <= documented.keys()
    words = " ".join(str(code) for code in documented if code)
    script = f'source {REPOSITORY}/slurm/lib.sh; for code in {words}; do echo "$code $(answer "$code")"; done'
    said = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True).stdout.split()
    assert dict(zip(map(int, said[::2]), said[1::2], strict=True)) | {0: "end"} == documented


@pytest.mark.parametrize("code", [0, 2, 75, 76, 77, 130, 137, 138, 143])
def test_which_ends_are_answered_with_a_requeue(tmp_path: Path, code: int) -> None:
    batch = Batch(tmp_path, "recipe", "train", str(write_recipe(tmp_path)), SRUN_EXIT=str(code))
    assert batch.code == code
    assert ("scontrol requeue 1234\n" in batch.record) == (documented_answers()[code] == "requeue")
    assert ("ntasks-per-node=1\n--input=none\ntrue\n" in batch.record) == (documented_answers()[code] == "look")
    ends = list((tmp_path / "run" / "logs").glob("attempt_1/end"))
    assert [path.read_text().split(": ")[1] for path in ends] == ["no rank has recorded its end\n"] * (code != 0)


def test_a_conversion_that_is_preempted_is_requeued(tmp_path: Path) -> None:
    words = ("convert", "to-hf", "--megatron", "x", "--hf", "y")
    batch = Batch(tmp_path, *words, SRUN_EXIT="143")
    assert "scontrol requeue 1234\n" in batch.record
    assert "is requeued, and starts again" in batch.stderr
    assert "scontrol" not in Batch(tmp_path / "second", *words, SRUN_EXIT="143", SLURM_RESTART_COUNT="3").record


@pytest.mark.parametrize(
    ("step", "text"),
    [
        ("none", "starts over: there is no checkpoint"),
        ("sft/30", "continues after step 30 of the warm-up"),
        ("4", "continues after step 4"),
    ],
)
def test_the_message_of_a_requeue_says_where_the_next_start_begins(step: str, text: str) -> None:
    script = f'source {REPOSITORY}/slurm/lib.sh; RUN_DIR=/x; newest_step() {{ echo "{step}"; }}; next_start'
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    assert done.stdout == text + "\n"


@pytest.fixture
def servers() -> Iterator[Path]:
    """The folder of the server of job 1234, which every batch script here takes itself for."""
    folder = REPOSITORY / "runs" / ".servers" / "1234"
    folder.mkdir(parents=True)
    yield folder
    shutil.rmtree(folder)


def test_a_server_that_is_stopped_is_requeued_while_jobs_use_it(tmp_path: Path, servers: Path) -> None:
    (servers / "clients").write_text("77\n")
    preempted = Batch(tmp_path, "serve", "/models/judge", "--dtype=auto", SRUN_EXIT="75", IN_QUEUE="77")
    assert "scontrol requeue 1234\n" in preempted.record
    serve = ["python", "-m", "megatron_rl.launch.serve", str(servers).replace(str(REPOSITORY), "HOME"), "10.0.0.003"]
    assert "\n".join([*serve, "/models/judge", "--dtype=auto"]) in preempted.record
    failed = Batch(tmp_path / "failed", "serve", "/models/none", SRUN_EXIT="2", IN_QUEUE="77")
    assert (failed.code, "requeue" in failed.record) == (2, False)
    (servers / "clients").unlink()
    limit = Batch(tmp_path / "limit", "serve", "/models/judge", site="kill -USR1 $$")
    assert (limit.code, "requeue" in limit.record) == (0, False)
    assert "the time limit is near, and no job uses this server" in limit.stderr


def test_a_job_whose_server_is_gone_ends_by_name(tmp_path: Path, servers: Path) -> None:
    (servers / "url").write_text("http://gpu003:23456\n")  # left by a server that was killed
    batch = Batch(tmp_path, "recipe", "train", str(write_recipe(tmp_path)), MEGATRON_RL_SERVERS="JUDGE_URL=1234/v1")
    assert batch.code == exit_codes.PREFLIGHT
    assert "the server of JUDGE_URL, job 1234, has left the queue" in batch.stderr


def test_a_signal_to_the_script_reaches_the_ranks_as_the_one_that_srun_passes_on(tmp_path: Path) -> None:
    rank = "trap 'exit 75' USR1; kill -TERM $PPID; while true; do sleep 0.1; done"
    (tmp_path / "site.sh").write_text("")
    (tmp_path / "job.sh").write_text(
        f"set -euo pipefail\nsource {REPOSITORY}/slurm/lib.sh\nscontrol() {{ :; }}\nsleep() {{ command sleep 20; }}\n"
        f'enter_home\nrank() {{ exec bash -c "{rank.replace("$", chr(92) + "$")}"; }}\nrun_and_wait rank\necho $CODE\n'
    )
    own = {"MEGATRON_RL_HOME": str(tmp_path), "MEGATRON_RL_SITE": str(tmp_path / "site.sh"), "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", str(tmp_path / "job.sh")], env={**os.environ, **own}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "75\n", done.stderr


def test_a_notice_before_there_are_ranks_is_answered_with_a_requeue(tmp_path: Path) -> None:
    batch = Batch(tmp_path, "recipe", "train", str(write_recipe(tmp_path)), site="kill -USR1 $$")
    assert "SIGUSR1: the job stops before it has started its ranks" in batch.stderr
    assert "srun" not in batch.record
    assert "scontrol requeue 1234\n" in batch.record


@pytest.mark.parametrize(
    ("restarts", "fate"),
    [("0", "Slurm has ended it: cancelled, or past its time limit"), ("1", "Slurm has requeued it")],
)
def test_where_slurm_has_decided_the_script_waits_for_its_end(tmp_path: Path, restarts: str, fate: str) -> None:
    own = {"JOB_STATE": "COMPLETING", "RESTARTS": restarts}
    batch = Batch(tmp_path, "recipe", "train", str(write_recipe(tmp_path)), SRUN_EXIT="75", **own)
    assert batch.code == 75
    assert "scontrol requeue" not in batch.record
    assert "sleep 300\n" in batch.record  # of a job that Slurm has requeued, an exit would be the end
    attempt = tmp_path / "run" / "logs" / "attempt_1"
    assert (attempt / "end").read_text().endswith(f": {fate}\n")
    assert (attempt / "requeued").exists() == (restarts == "1")


def test_a_controller_that_is_busy_is_asked_again(tmp_path: Path) -> None:
    recipe = str(write_recipe(tmp_path))
    busy = f'scontrol() {{ [[ "$2" != job || -e {tmp_path}/asked ]] || {{ touch {tmp_path}/asked; return 1; }}\n'
    batch = Batch(
        tmp_path,
        "recipe",
        "train",
        recipe,
        SRUN_EXIT="75",
        JOB_STATE="CANCELLED",
        site=busy + 'command scontrol "$@"; }',
    )
    assert "Slurm has decided whether the job runs again" in batch.stderr
    assert "scontrol requeue" not in batch.record


@pytest.mark.parametrize(("code", "again"), [(75, True), (0, False), (1, False)])
def test_a_batch_script_that_brings_its_own_srun_is_requeued_too(tmp_path: Path, code: int, again: bool) -> None:
    words = shlex.join(("train", str(write_recipe(tmp_path))))
    library = f'source "$MEGATRON_RL_HOME/slurm/lib.sh"\nenter_home\naround_srun {words}\n'
    library += 'echo "gpu-bind $SLURM_GPU_BIND" >> "$RECORD"\n'
    (tmp_path / "nemo.sbatch").write_text(f"set -e\nset +e\n{library}\nsrun x\nexitcode=$?\nset -e\nexit $exitcode\n")
    batch = Batch(tmp_path, str(tmp_path / "nemo"), SRUN_EXIT=str(code))
    assert batch.code == code
    assert "gpu-bind none\n" in batch.record
    assert ("scontrol requeue 1234\n" in batch.record) == again


@pytest.mark.parametrize(("code", "again"), [(143, True), (0, False), (2, False)])
def test_so_is_one_that_converts(tmp_path: Path, code: int, again: bool) -> None:
    library = 'source "$MEGATRON_RL_HOME/slurm/lib.sh"\nenter_home\nanswer_end\ntrap - ERR\n'
    (tmp_path / "nemo.sbatch").write_text(f"set -e\nset +e\n{library}\nsrun x\nexitcode=$?\nset -e\nexit $exitcode\n")
    batch = Batch(tmp_path, str(tmp_path / "nemo"), SRUN_EXIT=str(code))
    assert batch.code == code
    assert ("scontrol requeue 1234\n" in batch.record) == again


@pytest.mark.parametrize("code", ["1", "137", "139"])
def test_ranks_that_fail_because_a_node_is_gone_are_started_again(tmp_path: Path, code: str) -> None:
    recipe = str(write_recipe(tmp_path))
    batch = Batch(tmp_path, "recipe", "train", recipe, nodes=2, SRUN_EXIT=code, NODE_LOST="1")
    assert "scontrol requeue 1234\n" in batch.record
    assert "a node of this job does not answer any more" in batch.stderr


def test_requeues_that_bring_no_step_come_to_an_end(tmp_path: Path) -> None:
    recipe, once = str(write_recipe(tmp_path)), "MAX_REQUEUES_WITHOUT_PROGRESS=1"
    Batch(tmp_path, "recipe", "train", recipe, SRUN_EXIT="75", site=once)
    second = Batch(tmp_path, "recipe", "train", recipe, SRUN_EXIT="75", site=once)
    assert second.record.count("scontrol requeue") == 1
    assert second.code == 1
    assert "has started 2 times without getting past step none" in second.stderr
    (tmp_path / "run" / "checkpoints" / "step_10").mkdir(parents=True)  # progress: it may try again
    assert Batch(tmp_path, "recipe", "train", recipe, SRUN_EXIT="75", site=once).record.count("scontrol requeue") == 2


def test_slurms_own_requeues_count_too(tmp_path: Path) -> None:
    recipe, once = str(write_recipe(tmp_path)), "MAX_REQUEUES_WITHOUT_PROGRESS=1"
    for _ in range(3):  # where a node fails, the script has no say at the end
        batch = Batch(tmp_path, "recipe", "train", recipe, site=once)
    assert batch.code == 1
    assert batch.record.count("srun\n") == 2
    end = (tmp_path / "run" / "logs" / "attempt_3" / "end").read_text()
    assert re.fullmatch(r"1 job 1234 on .*: it has started 3 times without getting past step none\n", end)
