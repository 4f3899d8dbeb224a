"""The memory of a step's phases: what each component adds to them, and what is said where one does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_rl.config.actor import ActorConfig, FP8Config, MoEConfig, OptimizerConfig, ParallelConfig
from megatron_rl.config.algorithm import AlgorithmConfig, KLConfig
from megatron_rl.config.published import published_config
from megatron_rl.config.schema import CheckpointConfig, Config, RolloutConfig
from megatron_rl.models import model_of
from megatron_rl.planning.activations import activation_bytes_per_token
from megatron_rl.planning.components import (
    CHECK,
    CHECKPOINT,
    GENERATE,
    GIB,
    LOAD,
    OFFLOAD,
    OLD,
    PHASES,
    SYNC,
    UPDATE,
    MemoryPlan,
    Part,
)
from megatron_rl.planning.memory import actor_parameters, make_plan

from .planned_models import PUBLISHED, model_config


def plan_for(name: str, world: int = 8, rollout: RolloutConfig | None = None, **actor: Any) -> MemoryPlan:
    rollout = replace(rollout or RolloutConfig(), max_prompt_tokens=1024, max_tokens=7168)
    config = Config(run_dir="", actor=ActorConfig(**actor), rollout=rollout)
    return make_plan(config, model_of(model_config(name)), world, 79 * GIB)


def test_offload_takes_gradients_and_optimizer_out_of_the_engines_phases() -> None:
    resident, offloaded = plan_for("Qwen3-8B"), plan_for("Qwen3-8B", offload=True)
    state = 4 * 8_190_735_360 + 12 * 8_190_735_360 / 8
    for phase in (GENERATE, SYNC):
        assert resident.peak(phase) - offloaded.peak(phase) == pytest.approx(state)
    for phase in (LOAD, OLD, UPDATE):
        assert resident.peak(phase) == offloaded.peak(phase)
    assert resident.peak(OFFLOAD) == 0
    assert offloaded.peak(OFFLOAD) == pytest.approx(12 * 8_190_735_360 / 8)
    without = plan_for("Qwen3-8B", offload=True, offload_weights=True)
    weights = 2 * 8_190_735_360
    assert offloaded.peak(GENERATE) - without.peak(GENERATE) == pytest.approx(weights)
    assert without.peak(OFFLOAD) - offloaded.peak(OFFLOAD) == pytest.approx(weights)
    assert [without.peak(phase) for phase in (SYNC, UPDATE, CHECK)] == [
        offloaded.peak(phase) for phase in (SYNC, UPDATE, CHECK)
    ]


def test_an_optimizer_on_the_cpu_is_the_hosts_in_every_phase() -> None:
    there, here = (plan_for("Qwen3-8B", optimizer=OptimizerConfig(device=device)) for device in ("cpu", "gpu"))
    state = 12 * 8_190_735_360 / 8
    for phase in (GENERATE, OLD, UPDATE, SYNC, CHECK):
        assert here.peak(phase) - there.peak(phase) == pytest.approx(state)
    assert all(component.part is not Part.OPTIMIZER for component in there.components)
    assert [plan.peak(OFFLOAD) for plan in (there, here)] == [pytest.approx(state), 0]


def test_a_frozen_tower_has_no_gradients_and_no_optimizer_state() -> None:
    name = "Qwen2.5-VL-3B-Instruct"
    trained, frozen = plan_for(name), plan_for(name, freeze_vision_tower=True)
    tower = PUBLISHED[name] - PUBLISHED["Qwen2.5-3B"]  # its decoder
    assert trained.bytes_of(Part.GRADIENTS) - frozen.bytes_of(Part.GRADIENTS) == 4 * tower
    assert trained.bytes_of(Part.OPTIMIZER) - frozen.bytes_of(Part.OPTIMIZER) == pytest.approx(12 * tower / 8)
    assert trained.bytes_of(Part.WEIGHTS) == frozen.bytes_of(Part.WEIGHTS)


def test_experts_that_are_replayed_are_kept_for_the_tokens_of_the_engines_cache() -> None:
    config = Config(
        run_dir="", rollout=RolloutConfig(tensor_parallel=4), actor=ActorConfig(moe=MoEConfig(routing_replay="rollout"))
    )
    plan = make_plan(config, model_of(model_config("Qwen3-30B-A3B")), 8, 79 * GIB)
    assert plan.cache_tokens > 1e6
    assert plan.peak(OFFLOAD) == pytest.approx(48 * 8 * plan.cache_tokens)


def test_a_reference_takes_the_weights_place_while_it_is_scored() -> None:
    model, weights = model_of(model_config("Qwen3-8B")), 2 * 8_190_735_360
    plain, penalised = (
        make_plan(Config(run_dir="", algorithm=AlgorithmConfig(kl=KLConfig(coef=coef))), model, 8, 79 * GIB)
        for coef in (0, 0.1)
    )
    assert penalised.peak(OLD) - plain.peak(OLD) == penalised.peak(OFFLOAD) == weights
    assert penalised.peak(UPDATE) == plain.peak(UPDATE)


def test_a_host_that_is_too_small_is_named_with_the_phase() -> None:
    config = Config(run_dir="", actor=ActorConfig(offload=True), checkpoint=CheckpointConfig(every=10))
    plan = make_plan(config, model_of(model_config("Qwen3-8B")), 8, 79 * GIB, host_bytes=16 * GIB)
    copied = (2 + 12) * 8_190_735_360 / 8
    assert plan.peak(CHECKPOINT) == pytest.approx(plan.peak(OFFLOAD) + copied)
    [problem] = [problem for problem in plan.problems() if "host" in problem]
    assert problem.startswith(
        "phase checkpoint needs 8.8 GiB of the host's memory, for each GPU, more than there is; what h"
    )
    assert "checkpoint.every=0, actor.offload=false" in problem


def test_a_sync_takes_two_buckets_each_way_and_whole_tensors_more() -> None:
    assert plan_for("Qwen3-8B").bytes_of(Part.BUCKETS) == 4 * 256 * 2**20
    # Sixteen experts' share of each of 8 stages' layers, in bf16 and in FP8: gate, up and down are 1536 x 4096 each.
    collected = 8 * 16 * 3 * 1536 * 4096 * 3
    rollout = RolloutConfig(tensor_parallel=8, expert_parallel=True, fp8="blockwise")
    found = plan_for("Qwen3-235B-A22B", 128, rollout, parallel=ParallelConfig(pipeline=8, expert=16))
    assert found.bytes_of(Part.BUCKETS) == GIB
    assert found.bytes_of(Part.SYNC_LAYERS) == collected
    whole = RolloutConfig(sync="whole")
    experts = 3 * 128 * 1536 * 4096 * 2
    gathered = plan_for("Qwen3-235B-A22B", 128, whole).bytes_of(Part.BUCKETS)
    assert experts < gathered < 2 * experts + GIB
    assert plan_for("Qwen3-8B", 8, whole).bytes_of(Part.BUCKETS) == 3 * 151_936 * 4096 * 2


def test_the_sync_check_runs_the_actor_beside_its_state_before_the_engine_wakes() -> None:
    small, large = (plan_for("Qwen3-8B", tokens_per_microbatch=tokens) for tokens in (8192, 32768))
    actors = sum(part.bytes for part in small.components if part.phases == PHASES)
    assert small.peak(CHECK) == pytest.approx(actors + small.bytes_of(Part.SYNC_CHECK))
    # Of four rollouts each of eight data-parallel ranks scores one at most, of 8,192 tokens.
    assert small.bytes_of(Part.SYNC_CHECK) == large.bytes_of(Part.SYNC_CHECK)
    dims = small.model.dims
    assert small.bytes_of(Part.SYNC_CHECK) == 8192 * 2 * (3 * dims["hidden"] + 3 * dims["ffn"])


def test_fp8_copies_come_on_top_unless_the_parameters_are_fp8() -> None:
    """Qwen3-8B's matrices: all sides are multiples of 512, so blocks of 128 have a scale in each direction and none pads."""
    bf16, linear = plan_for("Qwen3-8B"), actor_parameters(model_of(model_config("Qwen3-8B"))).linear
    held = 2 * linear + 2 * 4 * linear // 128**2
    inside, beside = (plan_for("Qwen3-8B", fp8=FP8Config(param_gather=gather)) for gather in (True, False))
    assert inside.bytes_of(Part.WEIGHTS) - bf16.bytes_of(Part.WEIGHTS) == held - 2 * linear
    assert (beside.bytes_of(Part.WEIGHTS), beside.bytes_of(Part.FP8_COPIES)) == (bf16.bytes_of(Part.WEIGHTS), held)
    assert beside.peak(SYNC) == bf16.peak(SYNC) + held
    assert beside.peak(LOAD) == bf16.peak(LOAD)  # they come with the first forward pass


def test_fp8_products_keep_less_of_their_inputs() -> None:
    """Of a layer's numbers hidden (twice) and ffn are products' inputs: two bytes each, in blocks 1 + 4/128."""
    model, sizes = model_of(model_config("Qwen3-8B")), {"tensor": 1, "sequence": False}
    bf16, blockwise = (
        activation_bytes_per_token(model, model.experts, fp8=recipe, **sizes) for recipe in (None, "blockwise")
    )
    assert bf16 - blockwise == (2 * model.dims["hidden"] + model.dims["ffn"]) * (1 - 4 / 128)
    delayed, tensorwise = (
        activation_bytes_per_token(model, model.experts, fp8=recipe, **sizes) for recipe in ("delayed", "tensorwise")
    )
    assert delayed - tensorwise == model.attention.output_numbers


def test_a_model_that_is_too_large_is_said_not_to_fit_and_what_would_help() -> None:
    problems = list(plan_for("Qwen3-32B").problems())
    assert any("phase update" in problem and "actor.parallel.tensor" in problem for problem in problems)
    assert not list(plan_for("Qwen2.5-0.5B-Instruct", recompute="full").problems())


def test_full_recomputation_keeps_one_input_per_layer() -> None:
    model = model_of(model_config("Qwen3-8B"))
    tokens = 8192
    [activations] = [
        part.bytes
        for part in plan_for("Qwen3-8B", recompute="full", tokens_per_microbatch=tokens).components
        if part.part is Part.ACTIVATIONS
    ]
    hidden = model.dims["hidden"]
    inputs = 2 * tokens * hidden * model.dims["layers"]
    assert inputs < activations < inputs + 2 * tokens * (4 * hidden + 4 * model.dims["ffn"] + 6 * 4096)


def test_recomputation_of_some_layers_or_parts_lies_between_all_and_none() -> None:
    def activations(**actor: Any) -> float:
        return next(p.bytes for p in plan_for("Qwen3-8B", **actor).components if p.part is Part.ACTIVATIONS)

    dims, tokens, none = model_of(model_config("Qwen3-8B")).dims, 8192, activations(tokens_per_microbatch=8192)
    full = activations(recompute="full", tokens_per_microbatch=tokens)
    ten, five = (
        activations(recompute="full", recompute_layers=layers, tokens_per_microbatch=tokens) for layers in (10, 5)
    )
    assert full < ten < five < none
    assert five - ten == pytest.approx(none - five)
    parts = activations(recompute="selective", tokens_per_microbatch=tokens)
    again = 2 * tokens * (3 * dims["ffn"] + dims["hidden"])
    assert none - parts == pytest.approx(dims["layers"] * again, rel=0.05)
    assert activations(recompute="selective", recompute_modules=["core_attn"], tokens_per_microbatch=tokens) == none


def test_experts_that_are_cut_keep_the_tokens_of_all_ranks_that_share_them() -> None:
    model = model_of(published_config("Qwen3-235B-A22B"))
    whole, cut = (
        activation_bytes_per_token(model, model.experts, tensor=4, sequence=True, expert_tensor=ranks, dtype_bytes=2)
        for ranks in (1, 4)
    )
    # A rank's quarter of the tokens goes to 8 experts each; cut over four ranks, so does everyone's.
    assert cut - whole == 2 * 8 * model.dims["hidden"] * (1 - 1 / 4)
