"""Parameters of a plan's ranks against models that are really built, and the published sizes of those that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_rl.config.actor import ActorConfig, ParallelConfig
from megatron_rl.config.model import ModelConfig
from megatron_rl.config.published import published_names
from megatron_rl.config.schema import Config
from megatron_rl.models import model_of
from megatron_rl.planning.components import (
    GIB,
    MemoryPlan,
    Part,
)
from megatron_rl.planning.memory import (
    active_parameters,
    actor_parameters,
    cache_bytes_per_token,
    engine_parameters,
    make_plan,
    total_parameters,
)

from .planned_models import CASES, PUBLISHED, as_case, count, model_config


def test_every_model_of_the_tests_has_its_published_number_of_parameters() -> None:
    assert {name: total_parameters(model_of(model_config(name))) for name in published_names()} == PUBLISHED


def test_active_parameters_of_mixtures_are_those_of_their_names() -> None:
    assert active_parameters(model_of(model_config("Qwen3-30B-A3B"))) == pytest.approx(3.3e9, rel=0.02)
    assert active_parameters(model_of(model_config("Qwen3-235B-A22B"))) == pytest.approx(22e9, rel=0.02)
    for name, active in (("gpt-oss-20b", 3.61e9), ("gpt-oss-120b", 5.13e9)):  # OpenAI counts them without the embedding
        model = model_of(model_config(name))
        assert active_parameters(model) - model.dims["vocab"] * model.dims["hidden"] == pytest.approx(active, rel=0.002)


@pytest.fixture(scope="module")
def built() -> list[list[dict[str, int]]]:
    """Sizes on a rank of the first and of the last pipeline stage, as the product builds them."""
    return count([as_case(case, content=True) for case in CASES])


def planned(case: dict[str, Any]) -> tuple[MemoryPlan, Config]:
    config = Config(
        run_dir="",
        model=ModelConfig(dtype=case["dtype"]),
        actor=ActorConfig(parallel=ParallelConfig(**case["parallel"])),
    )
    return make_plan(config, model_of(case["model"]), case["world"], 80 * GIB), config


@pytest.mark.parametrize("number", range(len(CASES)))
def test_parameters_of_a_rank_are_those_of_the_model_that_is_built(
    number: int, built: list[list[dict[str, int]]]
) -> None:
    case = CASES[number]
    parallel = ParallelConfig(**case["parallel"])  # type: ignore[arg-type]
    model = model_of(case["model"])  # type: ignore[arg-type]
    layout = {
        "tensor": parallel.tensor,
        "pipeline": parallel.pipeline,
        "expert": parallel.expert,
        "expert_tensor": parallel.expert_tensor,
    }
    stages = [0, parallel.pipeline - 1]
    expected = [actor_parameters(model, **layout, stage=stage).total for stage in stages]
    assert [rank["parameters"] for rank in built[number]] == expected


@pytest.mark.parametrize("number", range(len(CASES)))
def test_gradients_and_optimizer_state_take_the_planned_bytes(number: int, built: list[list[dict[str, int]]]) -> None:
    plan, _ = planned(CASES[number])
    sizes = {one.part: one.bytes for one in plan.components}
    fullest = max(built[number], key=lambda rank: rank["parameters"])
    # Megatron starts every tensor at a multiple of 64 elements and makes shards equal: under 2 % of even a tiny model.
    assert 1 <= fullest["gradient_bytes"] / sizes[Part.GRADIENTS] < 1.02
    assert fullest["optimizer_bytes"] == pytest.approx(sizes[Part.OPTIMIZER], rel=0.02)


@pytest.mark.parametrize("pipeline", [2, 8])
def test_stages_add_up_to_the_model(pipeline: int) -> None:
    model = model_of(model_config("Qwen3-235B-A22B"))  # 94 layers
    stages = sum(actor_parameters(model, pipeline=pipeline, stage=stage).total for stage in range(pipeline))
    assert stages == total_parameters(model)


# -------------------------------------------------------------------------------------------------------- the engine
def test_an_engine_on_one_gpu_holds_the_model() -> None:
    for name, parameters in PUBLISHED.items():
        assert engine_parameters(model_of(model_config(name)), 1) == parameters, name


def test_an_engine_repeats_key_value_heads_where_ranks_outnumber_them() -> None:
    model = model_of(model_config("Qwen3-30B-A3B"))  # 4 key/value heads
    assert cache_bytes_per_token(model, 1) == 48 * 2 * 4 * 128 * 2
    assert cache_bytes_per_token(model, 4) == cache_bytes_per_token(model, 8) == 48 * 2 * 128 * 2
    repeated = (
        48 * model.dims["hidden"] * 2 * 128 // 2
    )  # a rank of 8 has a whole key and a whole value head, not half of each
    even = engine_parameters(model, 4) - engine_parameters(model, 8)
    assert even < engine_parameters(model, 4) / 2
    assert engine_parameters(model, 8) * 8 > total_parameters(model) + repeated
    assert engine_parameters(model, 8, expert=8) == engine_parameters(model, 8), (
        "whole experts are no more than slices of all"
    )
