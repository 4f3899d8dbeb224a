"""The memory plan against models that are really built, and against the published sizes of those that cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.actor import ActorConfig, FP8Config, MoEConfig, OptimizerConfig, ParallelConfig
from megatron_rl.config.algorithm import AlgorithmConfig, KLConfig
from megatron_rl.config.model import ModelConfig
from megatron_rl.config.published import published_config, published_names
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
from megatron_rl.planning.memory import (
    active_parameters,
    actor_parameters,
    cache_bytes_per_token,
    engine_parameters,
    make_plan,
    total_parameters,
)

RECIPES = Path(__file__).parents[2] / "recipes"

# As their model cards and safetensors indices give them.
PUBLISHED = {
    "Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen2.5-Math-1.5B": 1_543_714_304,
    "Qwen2.5-Math-7B": 7_615_616_512,
    "DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "DeepSeek-R1-Distill-Qwen-7B": 7_615_616_512,
    "DeepSeek-R1-Distill-Qwen-14B": 14_770_033_664,
    "Qwen3-1.7B": 1_720_574_976,
    # The language model, as transformers builds it from these sizes.
    "Qwen3.5-0.8B": 752_393_024,
    "Qwen3.5-2B": 1_881_825_088,
    "Qwen3.5-4B": 4_205_751_296,
    "Qwen3.5-9B": 8_953_803_264,
    "Qwen3.5-27B": 26_895_998_464,
    "Qwen3.6-27B": 26_895_998_464,
    "Qwen3.5-35B-A3B": 34_660_610_688,
    "Qwen3.6-35B-A3B": 34_660_610_688,
    "Qwen3-4B-Base": 4_022_468_096,
    "Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen3-4B-Thinking-2507": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "DeepSeek-V3": 671_026_419_200,
    "Kimi-K2-Instruct": 1_026_408_232_448,
    "GLM-4.5-Air": 106_852_251_264,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "Ministral-8B-Instruct-2410": 8_019_808_256,
    "Llama-3.2-3B-Instruct": 3_212_749_824,
    "Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen3-VL-8B-Instruct": 8_767_123_696,
    "Qwen3-VL-30B-A3B-Instruct": 31_070_754_032,
}


def model_config(name: str) -> dict[str, Any]:
    config = published_config(name)
    assert config is not None
    return config


def test_every_model_of_the_tests_has_its_published_number_of_parameters() -> None:
    assert {name: total_parameters(model_of(model_config(name))) for name in published_names()} == PUBLISHED


def test_active_parameters_of_mixtures_are_those_of_their_names() -> None:
    assert active_parameters(model_of(model_config("Qwen3-30B-A3B"))) == pytest.approx(3.3e9, rel=0.02)
    assert active_parameters(model_of(model_config("Qwen3-235B-A22B"))) == pytest.approx(22e9, rel=0.02)
    for name, active in (("gpt-oss-20b", 3.61e9), ("gpt-oss-120b", 5.13e9)):  # OpenAI counts them without the embedding
        model = model_of(model_config(name))
        assert active_parameters(model) - model.dims["vocab"] * model.dims["hidden"] == pytest.approx(active, rel=0.002)


# ----------------------------------------------------------------------------------------------------- built for real
def tiny(architecture: str, **other: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 8}
    sizes |= {"intermediate_size": 96, "vocab_size": 509, "max_position_embeddings": 512}
    return {"architectures": [architecture], "tie_word_embeddings": False, **sizes, **other}


QWEN3 = tiny("Qwen3ForCausalLM", head_dim=16)
QWEN2_TIED = tiny("Qwen2ForCausalLM", tie_word_embeddings=True)
MOE = tiny(
    "Qwen3MoeForCausalLM",
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    norm_topk_prob=True,
)
STACKED = tiny(
    "GptOssForCausalLM",
    attention_bias=True,
    head_dim=16,
    num_local_experts=8,
    num_experts_per_tok=2,
    sliding_window=64,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "truncate": False,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 16,
    },
)
CASES = [
    {"model": QWEN3, "world": 1, "parallel": {}, "dtype": "float32"},
    {"model": QWEN3, "world": 8, "parallel": {"tensor": 2, "pipeline": 2}, "dtype": "bfloat16"},
    {"model": QWEN2_TIED, "world": 8, "parallel": {"pipeline": 4, "virtual_pipeline": 2}, "dtype": "bfloat16"},
    # Chunks of 1, 2, 2 and 2, 2, 1 layers.
    {
        "model": QWEN3 | {"num_hidden_layers": 10},
        "world": 2,
        "parallel": {"pipeline": 2, "virtual_pipeline": 3},
        "dtype": "bfloat16",
    },
    {"model": QWEN3, "world": 6, "parallel": {"pipeline": 3}, "dtype": "bfloat16"},  # 3, 3 and 2 layers
    {"model": QWEN3, "world": 7, "parallel": {"pipeline": 7}, "dtype": "bfloat16"},  # 2 layers, then 1 on each
    {"model": QWEN2_TIED, "world": 4, "parallel": {"tensor": 4, "sequence": True}, "dtype": "bfloat16"},
    {"model": MOE, "world": 8, "parallel": {"expert": 4}, "dtype": "bfloat16"},
    {"model": MOE, "world": 16, "parallel": {"tensor": 2, "pipeline": 2, "expert": 2}, "dtype": "bfloat16"},
    {"model": MOE, "world": 8, "parallel": {"tensor": 4, "expert": 8, "sequence": True}, "dtype": "bfloat16"},
    {"model": MOE, "world": 8, "parallel": {"tensor": 4, "sequence": True}, "dtype": "bfloat16"},
    {"model": MOE, "world": 8, "parallel": {"tensor": 2, "expert": 2, "expert_tensor": 2}, "dtype": "bfloat16"},
    {"model": STACKED, "world": 8, "parallel": {"tensor": 2, "pipeline": 2, "expert": 2}, "dtype": "bfloat16"},
]


@pytest.fixture(scope="module")
def built() -> list[list[dict[str, int]]]:
    """Sizes on a rank of the first and of the last pipeline stage, as the product builds them."""
    return count([as_case(case, content=True) for case in CASES])


def as_case(case: dict[str, Any], content: bool) -> dict[str, Any]:
    """For `tests.planning.counted`."""
    overrides = [f"model.dtype={case['dtype']}", "actor.parallel.tensor=1"]
    overrides += [f"actor.parallel.{key}={str(value).lower()}" for key, value in case["parallel"].items()]
    return {
        "recipe": str(RECIPES / "cpu" / "quickstart.yaml"),
        "overrides": overrides,
        "model": case["model"],
        "world": case["world"],
        "ranks": [0, case["world"] - 1],
        "fused": True,
        "content": content,
    }


def count(cases: list[dict[str, Any]]) -> list[Any]:
    command = [sys.executable, "-m", "tests.planning.counted", json.dumps(cases)]
    root = Path(__file__).parents[2]
    result = subprocess.run(
        command, cwd=root, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=1800
    )
    answer = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    assert answer, result.stderr[-3000:]
    return list(json.loads(answer[0].removeprefix("RESULT ")))


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


# ------------------------------------------------------------------------------------------------------------ phases
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
