"""Bytes of a weight sync by arithmetic against the plan that a run makes."""

from __future__ import annotations

import pytest

from benchmarks.scale import LAYOUTS, RECIPES, layout_cost, of_recipe, recipe_cost
from megatron_rl.config import load_recipe
from megatron_rl.config.published import published_config
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.models import model_of
from megatron_rl.planning.time.step import sync_bytes


@pytest.mark.parametrize("name", LAYOUTS)
def test_of_a_layout(name: str) -> None:
    published, parallel, engine, _ = LAYOUTS[name]
    found = published_config(published)
    assert found is not None
    rollout = RolloutConfig(tensor_parallel=engine.tensor, expert_parallel=engine.expert)
    counted = layout_cost(name).bytes_moved
    assert sync_bytes(model_of(found), parallel, rollout) == pytest.approx(counted, rel=0.06, abs=1e6)


@pytest.mark.parametrize(("recipe", "nodes"), [("8b", 1), ("14b", 1), ("32b", 2), ("30b-a3b", 2), ("235b-a22b", 16)])
def test_of_a_recipe(recipe: str, nodes: int) -> None:
    config = load_recipe(RECIPES / f"qwen3-{recipe}.yaml")
    counted = recipe_cost(config, nodes).bytes_moved
    assert sync_bytes(of_recipe(config), config.actor.parallel, config.rollout) == pytest.approx(counted, rel=0.01)
