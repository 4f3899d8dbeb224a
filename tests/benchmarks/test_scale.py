"""What moving the weights costs by the plan, in the layouts that are held to a bound and in every recipe of recipes/scale."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks import scale
from megatron_rl.config import load_recipe
from megatron_rl.weights.sync_plan import BUCKET_BYTES

RECIPES = [
    path for path in sorted(scale.RECIPES.glob("[!_]*.yaml")) if "fp8" not in path.name
]  # whose layouts are the same


def bounded(cost: scale.Cost) -> None:
    assert cost.over_floor <= 1.05
    assert cost.bytes_moved == pytest.approx(cost.bytes_floor, rel=0.05)
    assert cost.bytes_moved <= cost.bytes_gathered
    assert cost.largest_buffer_bytes <= BUCKET_BYTES
    assert cost.plan_seconds < 10


@pytest.mark.parametrize("name", scale.LAYOUTS)
def test_layouts_of_four_ranks(name: str) -> None:
    cost = scale.layout_cost(name)
    bounded(cost)
    assert cost.bytes_sent <= 4 / 3 * cost.bytes_sent_mean * 1.001  # one rank alone holds what two of three others need


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_moves_no_more_on_more_nodes(path: object) -> None:
    config = load_recipe(str(path))
    parallel = config.actor.parallel
    fewest = parallel.pipeline * math.lcm(parallel.tensor * parallel.context, parallel.expert * parallel.expert_tensor)
    small, large = (scale.recipe_cost(config, nodes) for nodes in (max(16, fewest // 8), 128))
    for cost in (small, large):
        bounded(cost)
        assert cost.bytes_sent <= 1.34 * cost.bytes_sent_mean
    assert large.ranks == 1024
    assert large.bytes_moved == small.bytes_moved
    assert large.messages <= 1.05 * small.messages


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(scale.RECIPES / "qwen3-8b.yaml")
    assert scale.main([recipe, "--nodes", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # Tensor parallel 2 into engines of one GPU: half of 8.19 B bf16 numbers is at home, vocabulary and norms included.
    assert found["ranks"] == 16
    assert found["bytes_moved"] == found["bytes_floor"] == pytest.approx(8.19e9, rel=1e-3)
    assert found["over_floor"] == 1
    assert scale.main([recipe, "--nodes", "2"]) == 0
    assert "8.19" in capsys.readouterr().out
    assert scale.main([str(scale.RECIPES / "qwen3-235b-a22b.yaml"), "--nodes", "1"]) == 2
    assert (
        "8 ranks are no multiple of actor.parallel.tensor x pipeline x context (2 x 8 x 2)" in capsys.readouterr().err
    )
