"""Recipes whose checkpoint section cannot do what it says are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.config import ConfigError, Machine, check, load_recipe

RECIPE = Path(__file__).parents[2] / "recipes" / "cpu" / "quickstart.yaml"
METRIC = "eval/chain_sum_test/avg@1"
REFUSED = {
    "best of nothing": (["checkpoint.keep_best=1"], "needs checkpoint.best"),
    "nothing to keep": ([f"checkpoint.best={METRIC}"], "does nothing without checkpoint.keep_best"),
    "another task": (["checkpoint.keep_best=1", "checkpoint.best=eval/other/avg@1"], "chain_sum_test"),
    "never evaluated": (
        ["checkpoint.keep_best=1", f"checkpoint.best={METRIC}", "checkpoint.every=7", "trainer.eval_every=11"],
        "no step before the last has both",
    ),
    "what a failure does": (["checkpoint.on_failure=panic"], "continue, stop"),
    "fewer than none": (["checkpoint.keep_best=-1"], "checkpoint.keep_best"),
}


@pytest.mark.parametrize(("overrides", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_it_is_refused_with_the_key(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(load_recipe(RECIPE, overrides), machine=Machine())


def test_the_best_of_steps_that_are_evaluated_is_fine() -> None:
    overrides = ["checkpoint.keep_best=1", f"checkpoint.best={METRIC}", "checkpoint.every=5", "trainer.eval_every=5"]
    assert check(load_recipe(RECIPE, overrides), machine=Machine()).checkpoint.keep_best == 1
