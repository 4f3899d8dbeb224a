"""The package where there is no torch, and no source: as its wheel with what it declares, and in .venv-launch."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from megatron_rl.commands import COMMANDS
from megatron_rl.runtime.attempts import new_attempt

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("installed.py")
EXAMPLES = re.findall(r"^  megatron-rl (.*)$", (ROOT / "megatron_rl" / "cli.py").read_text(), re.MULTILINE)
OWN_METHODS = "\n".join(
    re.findall(r"```python\n(.*?)```", (ROOT / "docs/algorithms/adding-an-estimator.md").read_text(), re.DOTALL)
)
OWN_REWARD = re.findall(r"```python\n(.*?)```", (ROOT / "docs/rewards/your-own.md").read_text(), re.DOTALL)[0]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an installed wheel, without what it depends on."""
    root = tmp_path_factory.mktemp("wheel")
    source = root / "source"  # the builder leaves files in it
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("megatron_rl", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(root))
    subprocess.run((sys.executable, *build, str(source)), check=True, capture_output=True)
    [file] = root.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(root / "installed")
    return root / "installed"


def declared() -> list[str]:
    """The distributions that pyproject.toml's `dependencies` bring, with theirs."""
    known: dict[str, None] = {}
    todo = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    while todo:
        need = Requirement(todo.pop())
        if need.name not in known and (need.marker is None or need.marker.evaluate({"extra": ""})):
            known[need.name] = None
            todo += distribution(need.name).requires or []
    return list(known)


@pytest.fixture(scope="module")
def alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel and what it declares, nothing else: what `pip install` makes where nothing is."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "megatron_rl").symlink_to(wheel / "megatron_rl")
    for name in declared():
        of = distribution(name)
        tops = {Path(str(file)).parts[0] for file in of.files or () if ".." not in Path(str(file)).parts}
        for top in tops - {"__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(of.locate_file(top))))
    return folder


def outcomes(
    python: Sequence[str], commands: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> tuple[dict[str, tuple[int, str, str]], dict[str, object]]:
    """By command: exit code, standard output, standard error."""
    folder.mkdir(exist_ok=True)
    given = json.dumps([command.split() for command in commands])
    done = subprocess.run(
        (*python, str(PROGRAM), given), cwd=folder, env=dict(environment), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    return dict(zip(commands, map(tuple, said.pop("outcomes")), strict=True)), said


def write_files(folder: Path) -> None:
    """A run, and recipes of one's own with a plug-in and a reward."""
    run = folder / "run"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text(yaml.safe_dump({"run_dir": str(run), "trainer": {"steps": 10}}))
    (run / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "reward/mean": 0.5}\n')
    new_attempt(run)
    (folder / "my_methods.py").write_text(OWN_METHODS)
    (folder / "my_rewards.py").write_text(OWN_REWARD)
    (folder / "needs_torch.py").write_text("import torch\n")
    own = {
        "base": "cpu/quickstart.yaml",
        "algorithm": {
            "plugins": ["my_methods.py"],
            "estimator": {"name": "median_baseline", "params": {"scale": 0.5}},
            "surrogate": {"name": "sigmoid_gate"},
        },
        "rewards": {"brief": {"reward": "my_rewards.py:word_limit"}},
    }
    (folder / "run.sh").write_text(
        "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=model data.train_files=x.parquet"
    )
    (folder / "own.yaml").write_text(yaml.safe_dump(own))


CHECKED = [
    *(example if "--check" in example else f"{example} --check" for example in EXAMPLES),
    *("train cpu/quickstart.yaml --check", "sft recipes/cpu/quickstart.yaml --check", "train own.yaml --check"),
    *("evaluate cpu/quickstart.yaml --check", "reward-model cpu/preference_reward.yaml --check"),
]
READ = [
    "migrate run.sh",
    "status run",
    "report run",
    "plan cpu/quickstart.yaml",
    "plan scale/qwen3-32b.yaml --nodes 8 --html plan.html",
]
NEED_TORCH = ["train cpu/quickstart.yaml", "evaluate cpu/quickstart.yaml", "preflight cpu/quickstart.yaml"]
NEED_TORCH += ["plan scale/qwen3-8b.yaml --exact", "sft cpu/quickstart.yaml"]
REFUSED = {
    "train cpu/quickstart.yaml algorithm.plugins=[needs_torch.py] --check": "'needs_torch.py' imports 'torch', which is not",
    "convert to-hf --megatron nothing --hf there": "nothing does not exist",
    "train cpu/quickstart.yaml trainer.total_epochs=3": "verl's `trainer.total_epochs` is `trainer.steps` here",
    "train quickstart.yaml": "did you mean recipes/cpu/quickstart.yaml?",
    "train recipes/quickstart.yaml --check": "did you mean recipes/cpu/quickstart.yaml?",
}


@pytest.fixture(params=["a wheel", ".venv-launch"])
def without_torch(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, tuple[int, str, str]]]:
    """What every command says where torch is missing, in a folder that is not the source's."""
    if request.param == "a wheel":
        python = [sys.executable, "-S"]
        environment = {**os.environ, "PYTHONPATH": str(request.getfixturevalue("alone"))}
    else:
        python, environment = [str(ROOT / ".venv-launch" / "bin" / "python")], dict(os.environ)
        if not Path(python[0]).exists():
            (pytest.fail if os.environ.get("MEGATRON_RL_CI") else pytest.skip)("no .venv-launch; make launch-setup")
    write_files(tmp_path / "empty")
    commands = [*(f"{name} --help" for name in COMMANDS), *CHECKED, *READ, *NEED_TORCH, *REFUSED]
    found, about = outcomes(python, commands, tmp_path / "empty", {**environment, "CUDA_VISIBLE_DEVICES": ""})
    assert about["torch"] is False
    if request.param == "a wheel":
        assert str(ROOT) not in str(about["package"])
    return request.param, found


def test_what_needs_no_torch_runs_without_it(without_torch: tuple[str, dict[str, tuple[int, str, str]]]) -> None:
    found = without_torch[1]
    for command, (code, out, err) in found.items():
        assert "Traceback" not in err, f"{command}: {err}"
        if command in NEED_TORCH:
            assert code == 2, f"{command}: {out}{err}"
            assert re.fullmatch(r"megatron-rl: no torch here: .*`make setup`.*\n", err), f"{command}: {err}"
        elif command in REFUSED:
            assert code == 2, command
            assert REFUSED[command] in err, command
        else:
            assert code == 0, f"{command}: {out}{err}"
    assert "name: median_baseline" in found["train own.yaml --check"][1]
    assert found["plan cpu/quickstart.yaml"][1].count("\n") > 10


def test_what_the_package_declares_is_pinned_for_the_launcher() -> None:
    pinned = (ROOT / "requirements" / "launch.txt").read_text().lower()
    for name in declared():
        assert re.search(rf"^{name.lower()}==", pinned, re.MULTILINE), f"requirements/launch.txt lacks {name}"


@pytest.mark.ranks
@pytest.mark.engine
def test_a_shipped_recipe_trains_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(wheel), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    where = (sys.executable, "-c", "import megatron_rl; print(megatron_rl.__file__)")
    assert subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout.startswith(
        str(wheel)
    )
    short = ("trainer.steps=1", "trainer.prompts_per_step=4", "sft.steps=1", "trainer.eval_max_prompts=4")
    small = ("tasks.train.chain_sum.size=64", "launch.processes=1", "rollout.group_size=2")
    done = subprocess.run(
        (sys.executable, "-m", "megatron_rl", "train", "cpu/quickstart.yaml", *short, *small),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs" / "quickstart" / "export" / "config.json").is_file()
