"""What a launch consists of, what is packaged, and what is refused; no cluster, no NeMo-Run."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from megatron_rl import cli
from megatron_rl.config import ConfigError
from megatron_rl.launch import LaunchError, chain, one, read_site, sweep
from megatron_rl.launch.__main__ import main
from megatron_rl.launch.job_plan import read_sweep
from megatron_rl.launch.package import pack

from .conftest import need
from .jobs import REPOSITORY, write_recipe


def test_run_folders_are_absolute_wherever_the_code_is_copied_to(tmp_path: Path) -> None:
    recipe = str(write_recipe(tmp_path))
    assert one("train", recipe, ["run_dir=runs/x"], 2, tmp_path).arguments[-1] == f"run_dir={tmp_path}/runs/x"
    given = one("train", recipe, ["run_dir=/shared/x", "seed=5"], 2, tmp_path).arguments
    assert given == ("train", recipe, "seed=5", "run_dir=/shared/x")


def test_a_reward_model_is_launched_as_training_is(tmp_path: Path) -> None:
    recipe = str(REPOSITORY / "recipes" / "cpu" / "preference_reward.yaml")
    task = one("reward-model", recipe, ["run_dir=runs/x"], 2, tmp_path)
    assert task.arguments == ("reward-model", recipe, f"run_dir={tmp_path}/runs/x")
    with pytest.raises(ConfigError, match=r"`reward_model\.steps`"):
        one("reward-model", str(write_recipe(tmp_path)), [], 2, tmp_path)


def test_a_sweep_has_a_run_folder_for_every_line(tmp_path: Path) -> None:
    recipe, file = str(write_recipe(tmp_path)), tmp_path / "sweep.txt"
    file.write_text("# estimators x seeds\nalgorithm.preset=grpo seed=1\n\nalgorithm.preset=rloo seed=1 # a comment\n")
    first, second = sweep(recipe, read_sweep(file), ["trainer.steps=2"], None, tmp_path)
    folder = f"run_dir={tmp_path}/run/"
    common = ("train", recipe, "trainer.steps=2")
    assert first.arguments == (*common, "algorithm.preset=grpo", "seed=1", f"{folder}000-algorithm.preset=grpo_seed=1")
    assert second.arguments == (*common, "algorithm.preset=rloo", "seed=1", f"{folder}001-algorithm.preset=rloo_seed=1")
    seeds = [f"seed={number}" for number in range(60)]
    [long] = sweep(recipe, [" ".join(seeds)], [], None, tmp_path)
    assert Path(long.arguments[-1]).name == f"000-{'_'.join(seeds)}"[:255], "what a folder's name may have"
    with pytest.raises(ConfigError, match=r"line 1 of the sweep \(reward_model.steps=1\).*train does not read it"):
        sweep(recipe, ["reward_model.steps=1"], [], None, tmp_path)
    with pytest.raises(ConfigError, match=r"line 2 of the sweep \(sed=2\).*sed"):
        sweep(recipe, ["seed=1", "sed=2"], [], None, tmp_path)


def test_a_sweep_is_checked_line_by_line_before_it_is_submitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, file = str(write_recipe(tmp_path)), tmp_path / "sweep.txt"
    file.write_text("seed=1\nseed='2\n")
    assert main(["sweep", str(tmp_path), "2", str(file), recipe]) == 2
    assert "line 2 of the sweep (seed='2): No closing quotation" in capsys.readouterr().err
    assert main(["sweep", str(tmp_path), "2", str(tmp_path / "none.txt"), recipe]) == 2
    assert "none.txt cannot be read" in capsys.readouterr().err


def test_a_chain_without_a_model_to_convert_is_refused(tmp_path: Path) -> None:
    recipe = str(write_recipe(tmp_path))
    with pytest.raises(LaunchError, match=r"model\.path"):
        chain(recipe, [], None, tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        chain(recipe, ["model.create=null", "model.path=/nowhere"], None, tmp_path)


def test_a_layout_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="multiple of"):
        one("train", str(write_recipe(tmp_path)), ["actor.parallel.tensor=2"], 3, tmp_path)


def test_the_code_is_packaged_as_it_is(tmp_path: Path) -> None:
    root, site = tmp_path / "code", tmp_path / "my site.sh"
    (root / "sub").mkdir(parents=True)
    (root / "runs").mkdir()
    site.write_text("TASKS_PER_NODE=8")
    for name in ("kept.py", "edited.py", "deleted.py", "sub/with space.py"):
        (root / name).write_text("committed")
    (root / ".gitignore").write_text("runs/\nslurm/site.sh\n")
    git = ("git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "x")):
        subprocess.run((*git, *command), check=True)
    (root / "edited.py").write_text("not committed")
    (root / "new.py").write_text("not added")
    (root / "deleted.py").unlink()
    (root / "runs" / "large").write_text("x")
    pack(root, site, tmp_path / "a.tar.gz")
    subprocess.run(("tar", "-xzf", "a.tar.gz", "--one-top-level=out"), cwd=tmp_path, check=True)
    out = tmp_path / "out"
    assert {str(path.relative_to(out)): path.read_text() for path in out.rglob("*.*") if path.name != ".gitignore"} == {
        "kept.py": "committed",
        "edited.py": "not committed",
        "new.py": "not added",
        "sub/with space.py": "committed",
        "slurm/site.sh": "TASKS_PER_NODE=8",
    }
    with tarfile.open(tmp_path / "a.tar.gz") as archive:
        assert not any(name.startswith("runs") for name in archive.getnames())
    pack(root, site, tmp_path / "c.tar.gz", "/a venv")  # the work tree's own environment, which is not in the archive
    with tarfile.open(tmp_path / "c.tar.gz") as archive:
        file = archive.extractfile("slurm/site.sh")
        assert file is not None
        assert file.read().decode() == "TASKS_PER_NODE=8\nVENV='/a venv'\n"
    with pytest.raises(LaunchError, match="not a git repository"):
        pack(tmp_path, site, tmp_path / "b.tar.gz")


def test_the_site_file_is_read_as_the_scripts_read_it(tmp_path: Path) -> None:
    site = read_site(REPOSITORY, REPOSITORY / "slurm" / "site.example.sh")
    assert site.sbatch[:2] == ("--partition=gpu", "--account=my-project")
    assert (site.tasks_per_node, site.cpus_per_task, site.launcher, site.container_image) == (8, 14, "srun", None)
    assert (site.venv, site.venv_in_code) == (f"{REPOSITORY}/.venv", True)
    (tmp_path / "own.sh").write_text("echo loading modules; VENV=/shared/venv")
    own = read_site(REPOSITORY, tmp_path / "own.sh")
    assert (own.venv, own.venv_in_code) == ("/shared/venv", False)
    with pytest.raises(LaunchError, match=r"copy slurm/site\.example\.sh to it"):
        read_site(REPOSITORY, tmp_path / "none.sh")
    for bad in ("LAUNCHER=mpirun", "TASKS_PER_NODE=eight", "CPUS_PER_TASK=four"):
        (tmp_path / "bad.sh").write_text(bad)
        with pytest.raises(LaunchError, match=bad):
            read_site(REPOSITORY, tmp_path / "bad.sh")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--executor local --nodes 2", "--nodes has no effect here: it needs --executor slurm"),
        ("--executor slurm --user me", "--user has no effect here: it needs --host"),
        ("--executor slurm --chain --command sft", "--command has no effect here: it needs a single run"),
        ("--executor slurm --nodes 0", "--nodes must be at least 1"),
        ("--executor slurm --chain --sweep x", "one or the other"),
    ],
)
def test_options_without_effect_are_refused(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "recipe.yaml", *options.split()]) == 2
    assert message in capsys.readouterr().err


def test_without_nemo_run_the_command_says_how_to_get_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", str(write_recipe(tmp_path)), "--executor", "local"]) == 2
    assert "make launch-setup" in capsys.readouterr().err


def test_every_script_is_shellcheck_clean() -> None:
    need("shellcheck")
    scripts = sorted(str(path) for pattern in ("*.sh", "*.sbatch") for path in (REPOSITORY / "slurm").glob(pattern))
    assert len(scripts) >= 8
    done = subprocess.run(["shellcheck", "-x", *scripts, ".ci/run"], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_recipe_is_resolved_without_what_the_launching_environment_lacks(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    task = {"source": "jsonl", "path": str(tmp_path / "train.jsonl")}
    recipe = {
        "run_dir": str(tmp_path / "run"),
        "model": {"create": {}},
        "tasks": {"train": {"sums": task}},
        "rewards": {"correct": {"reward": "math"}},
        "rollout": {"max_tokens": 100, "max_prompt_tokens": 100},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    code = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'numpy', 'vllm', 'transformers', 'math_verify'))\n"
        f"from megatron_rl.launch.job_plan import resolve; resolve('train', {str(tmp_path / 'recipe.yaml')!r}, [], 1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
