from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_rl.cli import main
from megatron_rl.commands import evaluate
from megatron_rl.config import load_recipe
from megatron_rl.launch import ranks
from megatron_rl.runtime import stop
from megatron_rl.runtime.spawn import RanksOutcome

RECIPE = {
    "run_dir": "run",
    "model": {"create": {}, "dtype": "float32"},
    "tasks": {
        "train": {"sums": {"source": "reasoning_gym", "name": "chain_sum", "size": 10}},
        "eval": {"held_out": {"source": "reasoning_gym", "name": "chain_sum", "size": 5, "seed": 2}},
    },
    "rewards": {"correct": {"reward": "puzzle"}},
    "rollout": {"max_prompt_tokens": 32, "max_tokens": 48},
}
# Runs the command line, then says whether torch came in.
WITHOUT_TORCH = (
    "import sys\nfrom megatron_rl.cli import main\ntry:\n    code = main(sys.argv[1:])\nexcept SystemExit as end:\n"
    "    code = end.code\nassert not {'torch', 'vllm', 'transformers', 'megatron'} & set(sys.modules)\nsys.exit(code)"
)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return "recipe.yaml"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, env={**os.environ, **environment})


def test_check_prints_a_recipe_that_reads_back_and_starts_nothing(recipe: str) -> None:
    result = run("train", recipe, "--check", "trainer.steps=5", "actor.parallel.tensor=2", CUDA_VISIBLE_DEVICES="")
    assert (result.returncode, result.stderr) == (0, "")
    assert not Path("run").exists()
    Path("resolved.yaml").write_text(result.stdout)
    config = load_recipe("resolved.yaml")
    assert (config.trainer.steps, config.launch.processes) == (5, 2)


def test_help_needs_no_torch(recipe: str) -> None:
    result = run("--help")
    assert result.returncode == 0
    assert "train" in result.stdout
    config = [sys.executable, "-c", "import sys, megatron_rl.config; sys.exit('torch' in sys.modules)"]
    assert subprocess.run(config, timeout=30).returncode == 0


def test_a_plan_needs_no_torch(recipe: str) -> None:
    result = run("plan", recipe, "trainer.prompts_per_step=64")
    assert (result.returncode, result.stderr) == (0, "")
    assert "it fits" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nowhere.yaml"], "megatron-rl: nowhere.yaml does not exist"),
        (["train", "recipe.yaml", "trainer.step=5"], "did you mean `trainer.steps`?"),
        (["train", "recipe.yaml", "trainer.steps=0"], "`trainer.steps` must be at least 1"),
        (["train", "recipe.yaml", "algorithm.preset=shrinkage", "rollout.group_size=1"], "at least 2 rollouts"),
        (["train", "recipe.yaml", "tasks.train.sums.name=chain_sun"], "did you mean 'chain_sum'?"),
        (["train", "recipe.yaml", "tasks.train.file={source: jsonl, path: nowhere.jsonl}"], "nowhere.jsonl"),
        (["train", "recipe.yaml", "rewards.correct.reward=puzle"], "did you mean 'puzzle'?"),
        (["train", "recipe.yaml", "--check", "--resume", "nowhere"], "--resume nowhere: no such folder"),
        (["train"], "the following arguments are required: RECIPE\n"),
        (["sft", "recipe.yaml"], "`sft.steps` is 0"),
        (["train", "recipe.yaml", "--chekc"], "unrecognized arguments: --chekc"),
        (["train", "recipe.yaml", "--check", "stray"], "unrecognized arguments: stray"),
        (["evaluate", "recipe.yaml", "--resume", "auto"], "unrecognized arguments"),
        (["tarin", "recipe.yaml"], "invalid choice: 'tarin'"),
        (["preflight", "recipe.yaml", "--minutes", "nan"], "argument --minutes: 'nan' is no number"),
        (["preflight", "recipe.yaml", "--minutes", "2000"], "argument --minutes: must not be above 1,440"),
        (["convert", "to-hf", "--megatron", "a", "--hf", "b", "--shard-size", "infGB"], "'infGB' is not a size"),
        ([], "COMMAND"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_message_and_exit_code_2(
    recipe: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(arguments)
    except SystemExit as end:  # argparse
        code = end.code
    assert code == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""
    assert not Path("run").exists()


def test_a_recipe_for_another_machine_can_be_checked_but_not_started(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["train", recipe, "--check", "actor.fp8={}"]) == 0
    assert "the recipe is fine, but not for this machine" in capsys.readouterr().err
    assert main(["train", recipe, "actor.fp8={}"]) == 2


def test_of_torchruns_processes_only_the_first_of_a_node_complains(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert main(["train", recipe, "trainer.step=1"]) == 2
        assert ("did you mean" in capsys.readouterr().err) == (rank == "0")
    monkeypatch.setenv("LOCAL_RANK", "0")  # the first of another node, which may lack what rank 0's has
    assert main(["train", recipe, "trainer.step=1"]) == 2
    assert f"megatron-rl: on node {socket.gethostname()}: " in capsys.readouterr().err


def test_a_job_of_one_task_writes_into_its_batch_scripts_attempt(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = Path("run/logs/attempt_1").absolute()
    attempt.mkdir(parents=True)
    for name, value in {"MEGATRON_RL_ATTEMPT": str(attempt), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}.items():
        monkeypatch.setenv(name, value)
    logs = []
    monkeypatch.setattr(ranks, "run_ranks", lambda *given, **more: logs.append(given[2]) or RanksOutcome(0))
    assert main(["train", recipe]) == 0
    assert logs == [attempt]
    assert [path.name for path in Path("run/logs").iterdir()] == ["attempt_1"]


def handed_over(command: list[str]) -> str:
    """The recipe that a rank started with this command reads."""
    return Path(command[command.index("--recipe") + 1]).read_text()


def test_a_second_command_for_a_run_folder_changes_nothing_there(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in the seconds before the first one's ranks have started: those of the first train the first's recipe."""
    seen = []

    def run(command: list[str], *given: object, **more: object) -> RanksOutcome:
        seen.append(main(["train", recipe, "seed=2"]))
        seen.append(handed_over(command))
        seen.append([path.name for path in Path("run/logs").iterdir()])
        return RanksOutcome(0)

    monkeypatch.setattr(ranks, "run_ranks", run)
    assert main(["train", recipe, "seed=1"]) == 0
    code, text, attempts = seen
    assert code == 2
    assert "run belongs to a running job: process" in capsys.readouterr().err
    assert yaml.safe_load(text)["seed"] == 1
    assert load_recipe("run/recipe.yaml").seed == 1
    assert attempts == ["attempt_1"]
    assert not Path("run/owner.json").exists(), "given back"


def test_what_the_ranks_read_is_not_a_file_that_another_can_replace(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []

    def run(command: list[str], *given: object, files: tuple[int, ...], **more: object) -> RanksOutcome:
        Path("run/recipe.yaml").write_text("seed: 7\n")
        code = "import sys; print(open(sys.argv[1]).read())"
        argument = command[command.index("--recipe") + 1]
        for _ in range(2):  # every rank reads it from its beginning
            done = subprocess.run(
                [sys.executable, "-c", code, argument], capture_output=True, text=True, pass_fds=files
            )
            texts.append(yaml.safe_load(done.stdout))
        return RanksOutcome(0)

    monkeypatch.setattr(ranks, "run_ranks", run)
    assert main(["train", recipe, "seed=1"]) == 0
    assert [text["seed"] for text in texts] == [1, 1]


@pytest.mark.parametrize("rank", [0, 1])
def test_of_torchruns_processes_the_first_takes_the_run_folder_and_the_others_write_nothing(
    recipe: str, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    seen = {}

    def become(program: str, command: list[str]) -> None:
        there = {path.name for path in Path("run").iterdir()} if Path("run").exists() else set()
        seen.update(recipe=yaml.safe_load(handed_over(command)), files=there, owner=os.environ.get("MEGATRON_RL_OWNER"))

    monkeypatch.setattr(os, "environ", {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    monkeypatch.setattr(os, "execv", become)
    with stop.held_back():  # restores the mask: the command blocks signals for the rank that it becomes
        main(["train", recipe, "seed=1", "launch.processes=null"])
    assert seen["recipe"]["seed"] == 1
    assert seen["files"] == ({"recipe.yaml", "owner.json"} if rank == 0 else set())
    assert (seen["owner"] is not None) == (rank == 0)


def test_what_a_command_writes_is_as_private_as_the_umask_says(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "run_ranks", lambda *given, **more: RanksOutcome(0))
    before = os.umask(0o077)
    try:
        assert main(["train", recipe]) == 0
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o077 for path in [Path("run"), *Path("run").rglob("*")]}
    assert set(modes.values()) == {0}, modes


def test_of_several_tasks_one_asks_the_endpoint(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(evaluate, "_resolve", lambda args, machine: (load_recipe(recipe), None))
    monkeypatch.setattr(evaluate, "_ask", lambda *given: asked.append(os.environ["RANK"]) or 0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert main(["evaluate", recipe, "--endpoint", "http://localhost:1/v1"]) == 0
    assert asked == ["0"]


def test_a_run_folder_that_cannot_be_made(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", recipe, "run_dir=/proc/run"]) in (1, 2)
    assert "run_dir" in capsys.readouterr().err
