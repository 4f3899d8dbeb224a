"""Recipes as a user on a login node meets them, through `train --check` and `plan`: no weights, no GPU, no download."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from megatron_rl.cli import main
from megatron_rl.config import ConfigError, check
from megatron_rl.config.published import FOLDER

from .shipped import RECIPES, ROOT, loaded, runnable

pytestmark = pytest.mark.usefixtures("site")


@pytest.mark.parametrize("name", runnable())
def test_a_recipe_is_accepted_by_the_command_on_a_laptop(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["train", str(RECIPES / name), "--check"])
    printed = capsys.readouterr()
    assert code == 0, printed.err


def test_plan_on_a_laptop_without_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODELS", "/nowhere")
    recipe = str(RECIPES / "scale/qwen3-235b-a22b.yaml")
    model = ["--model-config", str(FOLDER / "Qwen3-235B-A22B.json")]
    assert main(["plan", recipe, "--nodes", "16", *model]) == 0
    printed = capsys.readouterr().out
    assert "235.09 B parameters, 22.19 B of them active per token\n" in printed
    assert "it fits" in printed.splitlines()
    assert "estimates, compared" in printed
    assert main(["plan", recipe, "--nodes", "16", "--hardware", "h100,memory_gib=40", *model]) == 1
    assert "IT DOES NOT FIT" in capsys.readouterr().out
    assert main(["plan", recipe, "actor.parallel.virtual_pipeline=5", "--nodes", "16", *model]) == 2
    assert "94 layers" in capsys.readouterr().err
    assert main(["plan", recipe, "--nodes", "16"]) == 0
    by_name = capsys.readouterr().out
    remark = "; sizes of the published Qwen3-235B-A22B, since /nowhere/Qwen3-235B-A22B does not exist\n"
    assert by_name == printed.replace("active per token\n", f"active per token{remark}")
    assert main(["plan", recipe, "--nodes", "16", "model.path=/nowhere/Qwen4"]) == 2
    assert "no published model called Qwen4; give its config.json: --model-config FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "overrides", "gpus"),
    [
        ("scale/qwen3-8b.yaml", [], 8),
        ("scale/qwen3-32b-fp8.yaml", [], 16),  # one node divides, and is too small
        ("scale/qwen3-235b-a22b.yaml", [], 128),  # 16 nodes are the fewest that divide
        ("scale/qwen3-235b-a22b.yaml", ["actor.parallel.pipeline=0"], None),
    ],
)
def test_plan_finds_the_fewest_nodes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    recipe: str,
    overrides: list[str],
    gpus: int | None,
) -> None:
    monkeypatch.setenv("MODELS", "/nowhere")
    assert main(["plan", str(RECIPES / recipe), *overrides]) == (2 if gpus is None else 0)
    printed = capsys.readouterr()
    assert f" on {gpus} GPUs; " in printed.out or "`actor.parallel.pipeline` must be at least 1" in printed.err


def test_plan_of_a_recipe_without_rewards_says_how_to_see_the_actors_part(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(RECIPES / "cpu/preference_reward.yaml")
    assert main(["plan", recipe]) == 2
    assert "add any reward, as in rewards.any.reward=length" in capsys.readouterr().err
    assert main(["plan", recipe, "rewards.any.reward=length"]) == 0


def test_a_check_without_the_model_says_that_it_is_missing_and_checks_its_published_sizes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODELS", "/nowhere")
    recipe = str(RECIPES / "scale/qwen3-32b.yaml")
    missing = "/nowhere/Qwen3-32B does not exist; the other checks used the published sizes of Qwen3-32B"
    assert main(["train", recipe, "--check"]) == 2
    assert capsys.readouterr().err == f"megatron-rl: `model.path`: {missing}\n"
    assert main(["train", recipe, "actor.parallel.tensor=16", "--check"]) == 2
    assert re.search(f"{missing}\n.*key/value heads", capsys.readouterr().err)


def test_the_readmes_plan_runs_in_a_fresh_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODELS", str(tmp_path / "models"))
    monkeypatch.chdir(tmp_path)  # where one writes its page
    (tmp_path / "recipes").symlink_to(RECIPES)
    commands = re.findall(r"^megatron-rl (plan [^#\n]*)", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    assert commands
    for command in commands:
        assert main(command.split()) == 0, capsys.readouterr().err


def test_a_reward_model_reads_text_only() -> None:
    check(loaded("cpu/visual.yaml"))
    with pytest.raises(ConfigError, match="reads text only, and the model has a vision tower"):
        check(loaded("cpu/visual.yaml"), command="reward-model")


def test_a_recipe_with_processes_of_its_own_is_checked_for_another_launchers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As slurm/submit.sh checks it, which leaves `launch.processes` to Slurm."""
    recipe = str(RECIPES / "cpu" / "quickstart.yaml")
    assert main(["train", recipe, "--check", "--processes", "16"]) == 0, capsys.readouterr().err
    assert yaml.safe_load(capsys.readouterr().out)["launch"]["processes"] is None
    assert main(["train", recipe, "rollout.tensor_parallel=2", "--check", "--processes", "3"]) == 2
    assert "the number of processes (3) must be a multiple of" in capsys.readouterr().err
