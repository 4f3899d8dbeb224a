"""NeMo-Run, in its own environment: the batch scripts it writes, and a run that it really submits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from e2e.job import rows

from .batch import compare
from .cluster import Cluster
from .jobs import REPOSITORY, SMALL, write_site

pytestmark = pytest.mark.slurm
PYTHON = REPOSITORY / ".venv-launch" / "bin" / "python"


@pytest.fixture
def launch(tmp_path: Path):
    """Runs `megatron-rl launch` on a recipe that lies inside the work tree, as it must."""
    if not PYTHON.exists():
        (pytest.fail if os.environ.get("MEGATRON_RL_CI") else pytest.skip)("no .venv-launch; make launch-setup")
    recipe = Path(__file__).parent / f"test-{os.getpid()}.yaml"  # not committed, and packaged nevertheless

    def run(*arguments: str, environment: Mapping[str, str] = os.environ, **sections: object) -> tuple[int, str]:
        recipe.write_text(yaml.safe_dump({**SMALL, "run_dir": str(tmp_path / "run"), **sections}, sort_keys=False))
        command = [str(PYTHON), "-m", "megatron_rl", "launch", str(recipe), *arguments]
        done = subprocess.run(
            command, cwd=REPOSITORY, env=dict(environment), capture_output=True, text=True, timeout=240
        )
        return done.returncode, done.stdout + done.stderr

    yield run
    recipe.unlink()


@pytest.mark.parametrize("nodes", [1, 2, 32])
def test_the_batch_script(launch, tmp_path: Path, nodes: int) -> None:
    site = REPOSITORY / "slurm" / "site.example.sh"
    options = ("--nodes", str(nodes), "--site", str(site), "--job-dir", str(tmp_path / "jobs"), "--name", "x")
    large = ("trainer.prompts_per_step=512", "sft.batch_size=256")
    code, text = launch("--executor", "slurm", *options, "--sbatch=--time=1:00:00", "--dry-run", *large)
    assert code == 0, text
    text = text[text.index("# ") :].replace(str(tmp_path), "FOLDER").replace(str(REPOSITORY), "HOME")
    compare(f"nemo_{nodes}.txt", re.sub(r"x_\d+", "x_ID", re.sub(r"test-\d+", "test", text)))


def test_a_run_on_two_nodes_is_submitted_and_trains(launch, cluster: Cluster, tmp_path: Path) -> None:
    site = write_site(tmp_path)
    code, text = launch(
        *("--executor", "slurm", "--nodes", "2", "--site", str(site), "--job-dir", str(tmp_path / "jobs")),
        environment=cluster.environment(),
        trainer={**SMALL["trainer"], "steps": 2},
    )
    assert code == 0, text
    number = re.search(r"Slurm job (\d+)", text)
    assert number is not None, text
    cluster.wait_for_state(number[1], "COMPLETED")
    run = tmp_path / "run"
    assert rows(run)[-1]["step"] == 2
    assert {path.name for path in (run / "logs" / "attempt_1").glob("rank_*.log")} == {"rank_0.log", "rank_1.log"}
    assert "nodes n[1-2]" in (run / "logs" / "starts").read_text()
    packaged = next((tmp_path / "jobs").rglob("code/megatron_rl/cli.py"))
    assert packaged.read_bytes() == (REPOSITORY / "megatron_rl" / "cli.py").read_bytes()


def test_a_recipe_that_cannot_run_is_refused(launch, tmp_path: Path) -> None:
    site = str(REPOSITORY / "slurm" / "site.example.sh")
    code, text = launch("--executor", "slurm", "--site", site, "--dry-run", "trainer.stepz=1")
    assert (code, "trainer.stepz" in text) == (2, True)
    outside = tmp_path / "recipe.yaml"
    outside.write_text("{}")
    command = [str(PYTHON), "-m", "megatron_rl", "launch", str(outside), "--executor", "slurm", "--site", site]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, "is what is packaged" in done.stderr) == (2, True)


def test_from_a_laptop(launch, tmp_path: Path) -> None:
    site = tmp_path / "site.sh"
    example = (REPOSITORY / "slurm" / "site.example.sh").read_text()
    site.write_text(example + "VENV=/lustre/me/venv\n")
    remote = ("--host", "login.invalid", "--user", "me", "--job-dir", "/lustre/me", "--dry-run")
    no_model = {**SMALL["model"], "create": None, "path": "/lustre/models/qwen"}
    options = ("--executor", "slurm", "--site", str(site), *remote, "run_dir=runs/x")
    page = (REPOSITORY / "docs" / "algorithms" / "adding-an-estimator.md").read_text()
    plugin = tmp_path / "my_methods.py"
    plugin.write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    code, text = launch(
        *options,
        environment={**os.environ, "NEMORUN_HOME": str(tmp_path)},
        model=no_model,
        algorithm={"plugins": [str(plugin)], "estimator": {"name": "median_baseline"}},
    )
    assert code == 0, text
    assert re.search(r"#SBATCH --output=/lustre/me/test-\d+/", text)
    assert "run_dir=/lustre/me/runs/x" in text
    code, text = launch(*options, "trainer.stepz=1", environment={**os.environ, "NEMORUN_HOME": str(tmp_path)})
    assert (code, "trainer.stepz" in text) == (2, True)
    site.write_text(example)  # its VENV would be in the copy of the code
    code, text = launch(*options, environment={**os.environ, "NEMORUN_HOME": str(tmp_path)}, model=no_model)
    assert code == 2
    assert f"VENV in {site} is in the folder of the code ($MEGATRON_RL_HOME)" in text


def test_on_this_machine(launch, tmp_path: Path) -> None:
    code, text = launch(
        *("--executor", "local", "--python", sys.executable, "launch.processes=1"),
        environment={**os.environ, "OMP_NUM_THREADS": "1", "NEMORUN_HOME": str(tmp_path / "jobs")},
        trainer={**SMALL["trainer"], "steps": 1},
    )
    assert code == 0, text
    assert rows(tmp_path / "run")[-1]["step"] == 1
    assert {path.name for path in (tmp_path / "run" / "logs" / "attempt_1").glob("rank_*.log")} == {"rank_0.log"}


def test_nemo_runs_own_command_line_finds_the_site_and_the_commands(tmp_path: Path) -> None:
    if not PYTHON.exists():
        (pytest.fail if os.environ.get("MEGATRON_RL_CI") else pytest.skip)("no .venv-launch; make launch-setup")
    own = {"NEMORUN_HOME": str(tmp_path / "jobs"), "MEGATRON_RL_SITE": str(write_site(tmp_path))}
    overrides = f"overrides=trainer.steps=2 seed=7 run_dir={tmp_path}/run"
    done = subprocess.run(
        (
            *(str(PYTHON.with_name("nemo")), "megatron_rl", "train", "recipe=recipes/cpu/quickstart.yaml", overrides),
            *("run.executor=site", "run.executor.nodes=2", "--dryrun", "--yes"),
        ),
        cwd=REPOSITORY,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "#SBATCH --nodes=2\n" in done.stdout
    assert "around_srun train recipes/cpu/quickstart.yaml trainer.steps=2 seed=7" in done.stdout
