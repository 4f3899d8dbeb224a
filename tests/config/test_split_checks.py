"""What `launch.generators` and `trainer.like_lengths` are refused with, and what follows from the first."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.base.messages import ConfigError
from megatron_rl.config import Machine, check, load_recipe
from megatron_rl.config.checks import smallest_world

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "cpu" / "quickstart.yaml"
CPU = Machine(gpus=0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("launch.generators=2",), "must leave some of the 2 processes to learn"),
        (("launch.processes=4", "rollout.tensor_parallel=2"), "must be multiples of `rollout.tensor_parallel` (2)"),
        (
            ("launch.processes=4", "actor.parallel.tensor=2"),
            "(3) must be a multiple of actor.parallel.tensor x pipeline",
        ),
        (("actor.offload=true",), "the processes that learn have none"),
        (("rollout.exact=true",), "these are a step older"),
    ],
)
def test_what_it_does_not_go_with(overrides: tuple[str, ...], message: str) -> None:
    config = load_recipe(RECIPE, ["launch.generators=1", *overrides])
    with pytest.raises(ConfigError) as refusal:
        check(config, machine=CPU)
    assert message in str(refusal.value)
    assert "launch.generators" in str(refusal.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("launch.generators=1", "in other processes than those that save"),
        ("rollout.partial={chunk_tokens: 8}", "no step waits for its longest response"),
        ("algorithm.preset=dapo", "takes prompts until enough have a signal"),
    ],
)
def test_what_steps_of_like_lengths_do_not_go_with(override: str, message: str) -> None:
    config = load_recipe(RECIPE, ["trainer.like_lengths=4", override])
    with pytest.raises(ConfigError, match=r"`trainer\.like_lengths` does not go with this recipe") as refusal:
        check(config, machine=CPU)
    assert message in str(refusal.value)
    check(load_recipe(RECIPE, ["trainer.like_lengths=4"]), machine=CPU)


def test_what_follows_from_it() -> None:
    config = load_recipe(RECIPE, ["launch.generators=3", "launch.processes=null", "actor.parallel.tensor=2"])
    assert config.algorithm.correction.weight == "token"
    assert smallest_world(config) == 5
    assert check(config, machine=CPU).launch.processes == 5
    assert check(config, machine=CPU, command="evaluate").launch.generators is None
    assert load_recipe(RECIPE, []).algorithm.correction.weight == "none"
    own = load_recipe(RECIPE, ["launch.generators=1", "algorithm.correction.weight=none"])
    assert own.algorithm.correction.weight == "none"
