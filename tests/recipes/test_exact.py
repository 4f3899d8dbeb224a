"""`plan --exact`: tensors without content take what those with content take, and every recipe builds at its real size."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config import load_recipe
from megatron_rl.config.published import published_config
from megatron_rl.config.schema import Config
from megatron_rl.models import model_of
from megatron_rl.planner import ACTIVATIONS, GIB, GRADIENTS, HEAD, OPTIMIZER, WEIGHTS, make_plan

from .test_planner import CASES, MOE, QWEN3, RECIPES, as_case, count
from .test_recipes import header, runnable

# Sizes at which activations outweigh what does not grow with them.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 2048}
PASSES = [
    {"model": {**QWEN3, **WIDE}, "world": 1, "parallel": {}, "dtype": "float32"},
    {
        "model": {**MOE, **WIDE, "moe_intermediate_size": 128},
        "world": 2,
        "parallel": {"pipeline": 2},
        "dtype": "bfloat16",
    },
]


REFUSED = as_case(CASES[0], content=False) | {"overrides": ["actor.parallel.pipeline=3"], "world": 4}


@pytest.fixture(scope="module")
def counted() -> dict[str, list[Any]]:
    """All in one process, most of whose time is imports."""
    passes = [as_case(case, content) | {"ranks": None} for case in PASSES for content in (True, False)]
    cases = {
        "state": [as_case(case, content) for case in CASES for content in (True, False)],
        "passes": [case | {"fused": fused} for fused in (True, False) for case in passes],
        "recipes": [as_counted(*recipe) for recipe in of_recipes()],
        "choices": [as_counted(*recipe, *overrides) for *recipe, overrides in of_choices()],
        "refused": [REFUSED],
    }
    for case in cases["passes"]:
        case["overrides"] = [*case["overrides"], "actor.tokens_per_microbatch=1024"]
    found = iter(count([case for kind in cases.values() for case in kind]))
    return {kind: [next(found) for _ in of_kind] for kind, of_kind in cases.items()}


def test_state_is_that_of_ranks_with_content_to_the_byte(counted: dict[str, list[Any]]) -> None:
    for with_content, without in zip(counted["state"][::2], counted["state"][1::2], strict=True):
        assert without == with_content
        assert not isinstance(without, str), without


def test_passes_take_what_they_take_with_content(counted: dict[str, list[Any]]) -> None:
    for with_content, without in zip(counted["passes"][::2], counted["passes"][1::2], strict=True):
        assert not isinstance(without, str), without
        for real, own in zip(with_content, without, strict=True):
            assert own["rank"] == real["rank"]
            assert own["update_bytes"] == pytest.approx(real["update_bytes"], rel=0.02)
            assert own["check_bytes"] == pytest.approx(real["check_bytes"], rel=0.02)


def of_recipes() -> list[tuple[str, int, dict[str, Any]]]:
    """Recipe, GPUs and the model's config.json of every recipe that names GPUs, one of each layout."""
    found: dict[str, tuple[str, int, dict[str, Any]]] = {}
    for name in runnable():
        config = load_recipe(RECIPES / name)
        machine = re.match(r"(\d+) nodes? x (\d+) H100", header(name).get("Hardware", ""))
        if config.model.path is None or machine is None:
            continue
        model = published_config(Path(config.model.path).name)
        assert model is not None, name
        if "vision_config" in model:  # refused: a tower is not counted yet
            continue
        world = int(machine[1]) * int(machine[2])
        actor = config.actor
        key = json.dumps(
            [world, Path(config.model.path).name, vars(actor.parallel), actor.optimizer.distributed, actor.lora.rank]
        )
        found.setdefault(key, (name, world, dict(model)))
    return list(found.values())


def as_counted(name: str, world: int, model: dict[str, Any], *overrides: str) -> dict[str, Any]:
    case = {"recipe": str(RECIPES / name), "overrides": overrides, "model": model, "world": world, "ranks": None}
    return case | {"fused": True, "content": False}


def of_choices() -> list[tuple[str, int, dict[str, Any], tuple[str, ...]]]:
    """Every way to recompute, of a dense model and of one with experts, each with fewer layers."""
    ways = {
        "awpo/qwen3-1.7b": ("none", "full", "selective"),
        "scale/qwen3-30b-a3b": ("none", "selective moe", "selective moe_act,layernorm"),
    }
    found = []
    for wanted, choices in ways.items():
        name, world, model = next(recipe for recipe in of_recipes() if recipe[0].startswith(wanted))
        for way, *modules in map(str.split, choices):
            overrides = (f"actor.recompute={way}", *(f"actor.recompute_modules=[{names}]" for names in modules))
            found.append((name, world, {**model, "num_hidden_layers": 4}, overrides))
    return found


def test_the_arithmetic_is_near_what_is_counted_of_every_recipe(counted: dict[str, list[Any]]) -> None:
    """State within 2 %, passes within 10 %."""
    for (name, world, model), ranks in zip(of_recipes(), counted["recipes"], strict=True):
        assert not isinstance(ranks, str), f"{name}: {ranks}"
        sizes = parts(load_recipe(RECIPES / name), model, world)
        fullest = max(ranks, key=lambda rank: rank["parameters"])
        assert fullest["parameter_bytes"] == sizes[WEIGHTS], name
        assert fullest["gradient_bytes"] == pytest.approx(sizes[GRADIENTS], rel=0.02), name
        assert fullest["optimizer_bytes"] == pytest.approx(sizes[OPTIMIZER], rel=0.02), name
        most = max(rank["update_bytes"] for rank in ranks)
        assert sizes[ACTIVATIONS] + sizes[HEAD] == pytest.approx(most, rel=0.1), name


def test_the_arithmetic_is_near_what_is_counted_of_every_way_to_recompute(counted: dict[str, list[Any]]) -> None:
    for (name, world, model, overrides), ranks in zip(of_choices(), counted["choices"], strict=True):
        assert not isinstance(ranks, str), f"{name} {overrides}: {ranks}"
        sizes = parts(load_recipe(RECIPES / name, overrides), model, world)
        most = max(rank["update_bytes"] for rank in ranks)
        assert sizes[ACTIVATIONS] + sizes[HEAD] == pytest.approx(most, rel=0.1), (name, overrides)


def parts(config: Config, model: dict[str, Any], world: int) -> dict[str, float]:
    return {part.name: part.bytes for part in make_plan(config, model_of(model), world, 79 * GIB).components}


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_rl", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_the_command() -> None:
    recipe = str(RECIPES / "scale" / "qwen3-8b.yaml")
    done = plan(recipe, "--nodes", "1", "--exact", "--json", "actor.tokens_per_microbatch=9216", "actor.recompute=full")
    assert done.returncode == 0, done.stderr
    [ranks] = json.loads(done.stdout)["rank_classes"]
    assert (ranks["rank"], ranks["ranks"], ranks["parameters"]) == (0, 8, 4_095_521_792)
    assert ranks["parameter_bytes"] == 2 * ranks["parameters"]
    assert ranks["phases"]["update"]["peak_bytes"] > sum(ranks[f"{part}_bytes"] for part in ("parameter", "gradient"))
    assert "rank_classes" not in json.loads(plan(recipe, "--json", "--nodes", "1").stdout)  # the predicted step alone


def test_what_megatron_refuses_is_refused_with_its_reason(counted: dict[str, list[Any]]) -> None:
    assert counted["refused"] == ["rank 0 of 4 cannot be built: world_size (4) is not divisible by 3"]
