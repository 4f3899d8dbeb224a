"""Split placement (`launch.generators`) in plans: a GPU has one role, and a step takes as long as the slower one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli import main
from megatron_rl.config import Config, load_recipe
from megatron_rl.config.published import published_config
from megatron_rl.models import model_of
from megatron_rl.planning.components import GENERATE, GIB, PHASES, SYNC, Component, Part
from megatron_rl.planning.memory import make_plan

PLAN = ("plan", "recipes/scale/qwen3-32b.yaml", "--nodes", "16")
ALONE = ("actor.offload=false", "actor.offload_weights=false")


def parts(config: Config) -> dict[Part, list[Component]]:
    plan = make_plan(config, model_of(published_config("Qwen3-32B") or {}), 16, 79 * GIB)
    found: dict[Part, list[Component]] = {}
    for one in plan.components:
        found.setdefault(one.part, []).append(one)
    return found


def test_a_gpu_holds_what_its_role_needs() -> None:
    config = Config(run_dir="")
    config.actor.parallel.tensor, config.rollout.tensor_parallel = 8, 4
    together, config.launch.generators = parts(config), 8
    split = parts(config)
    assert {phase for one in split[Part.WEIGHTS] for phase in one.phases} == {*PHASES} - {GENERATE}
    for part in (Part.ENGINE_WEIGHTS, Part.CACHE, Part.ENGINE_WORKSPACE):
        assert [one.phases for one in split[part]] == [(GENERATE,)]
    assert {one.phases for one in split[Part.BUCKETS]} == {(GENERATE,), (SYNC,)}
    # The optimizer's state is sharded over half as many ranks.
    assert split[Part.OPTIMIZER][0].bytes == 2 * together[Part.OPTIMIZER][0].bytes
    plan = make_plan(config, model_of(published_config("Qwen3-32B") or {}), 16, 79 * GIB)
    assert (plan.engines, plan.data_parallel, plan.actor_world) == (2, 1, 8)


def figures(capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    assert main([*PLAN, *ALONE, "--json", *more]) in (0, 1)  # 1: it does not fit
    return json.loads(capsys.readouterr().out)


def test_a_step_takes_as_long_as_the_slower_role(capsys: pytest.CaptureFixture[str]) -> None:
    for generators in (32, 96):
        seconds = figures(capsys, f"launch.generators={generators}")["step_time"]["seconds"]
        step, sync = seconds.pop("step"), seconds.pop("sync")
        drawing = seconds.pop("generate")
        assert step == pytest.approx(max(drawing, sum(seconds.values())) + sync)
    together = figures(capsys)["step_time"]["seconds"]
    assert together["step"] == pytest.approx(sum(value for name, value in together.items() if name != "step"))


def test_a_simulation_has_the_recipes_own_split_beside_the_other_ways(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, *ALONE, "--simulate", "--simulated-steps", "2", "launch.generators=64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("split, launch.generators=64 of 128 GPUs") for line in lines)
    assert any(line.startswith("synchronous") for line in lines)


def test_a_simulation_names_the_placement_that_it_compares_with(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ("actor.parallel={tensor: 2, pipeline: 3}", "rollout.tensor_parallel=2", "launch.generators=2")
    arguments = ["plan", "recipes/scale/qwen3-8b.yaml", "--nodes", "1", *ALONE, *layout]
    assert main(arguments) in (0, 1)
    assert main([*arguments, "--simulate"]) == 2
    said = capsys.readouterr().err
    assert "--simulate also shows the recipe with launch.generators=null: the number of processes (8)" in said


def test_a_search_tries_other_splits_and_writes_the_fastest(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    search = ("plan", "recipes/scale/qwen3-8b.yaml", "--nodes", "3", "--search", "--json", "launch.generators=8")
    assert main([*search, *ALONE, "--write", str(tmp_path / "found.yaml")]) == 0
    found = json.loads(capsys.readouterr().out)["layouts"]
    first = found[0]
    written = load_recipe(tmp_path / "found.yaml")
    assert {layout["launch"]["generators"] for layout in found} <= {8, 16}
    assert written.launch.generators == first["launch"]["generators"]
    assert not written.actor.offload
    assert written.rollout.memory_fraction == first["rollout"]["memory_fraction"] > 0.6
    seconds = first["step_time"]["seconds"]
    assert seconds["step"] < sum(value for name, value in seconds.items() if name != "step")
