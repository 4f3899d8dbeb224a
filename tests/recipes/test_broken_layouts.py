"""Layouts that Megatron-Core, Transformer Engine or vLLM cannot have: `plan --exact` says why, and builds nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.cli import main

SCALE = Path(__file__).parents[2] / "recipes" / "scale"
DENSE, EXPERTS, LARGE = ("qwen3-8b", 2), ("qwen3-30b-a3b", 4), ("qwen3-235b-a22b", 16)  # with nodes of 8
BROKEN = [
    (DENSE, "parallel.tensor=3", "the model's attention heads (32) must be a multiple of `actor.parallel.tensor` (3)"),
    (DENSE, "parallel.tensor=16", "the model's key/value heads (8) must be a multiple of `actor.parallel.tensor` (16)"),
    (DENSE, "parallel.tensor=1", "`actor.parallel.sequence` needs `actor.parallel.tensor` > 1, which is 1"),
    (
        DENSE,
        "parallel.tensor=4 parallel.pipeline=8",
        "must be a multiple of actor.parallel.tensor x pipeline (4 x 8 = 32)",
    ),
    (DENSE, "parallel.pipeline=7", "must be a multiple of actor.parallel.tensor x pipeline (2 x 7 = 14)"),
    (DENSE, "parallel.pipeline=2 parallel.virtual_pipeline=5", "36 layers do not divide over 5 model chunks per stage"),
    (DENSE, "parallel.virtual_pipeline=2", "`actor.parallel.virtual_pipeline` (2) needs `actor.parallel.pipeline` > 1"),
    (DENSE, "parallel.expert=2", "`actor.parallel.expert` is 2, but the model has no experts"),
    (DENSE, "parallel.expert_tensor=2", "`actor.parallel.expert_tensor` is 2, but the model has no experts"),
    (DENSE, "parallel.context=3", "must be a multiple of actor.parallel.tensor x pipeline x context (2 x 1 x 3 = 6)"),
    (DENSE, "tokens_per_microbatch=4096", "`actor.tokens_per_microbatch` (4096) must hold the longest sequence"),
    (DENSE, "recompute_modules=[moe]", "`actor.recompute_modules` (moe) names nothing that this model has"),
    (DENSE, "recompute_modules=[]", "`actor.recompute=selective` needs `actor.recompute_modules`, which is empty"),
    (DENSE, "recompute=full recompute_layers=0", "`actor.recompute_layers` must be at least 1; it is 0"),
    (DENSE, "fp8={recipe: delayed}", "rounds most of the gradient to 0; set actor.fp8.format=hybrid"),
    (
        DENSE,
        "fp8={recipe: delayed, format: hybrid, bf16_ends: 1}",
        "cannot go with recipe=delayed, whose scales span all",
    ),
    (DENSE, "fp8={recipe: mxfp8, param_gather: true}", "Megatron-Core's buffers cannot hold its parameters"),
    (DENSE, "fp8={param_gather: true} optimizer.distributed=false", "the plain optimizer knows no parameters in FP8"),
    (DENSE, "fp8={bf16_ends: 37}", "(37) must be at most 36, the model's 36 layers over 1 pipeline stages"),
    (
        DENSE,
        "optimizer.moments=bfloat16 optimizer.distributed=false",
        "needs actor.optimizer.distributed=true and model.dt",
    ),
    (
        DENSE,
        "offload=false offload_weights=true",
        "`actor.offload_weights` without `actor.offload` leaves on the device",
    ),
    (DENSE, "lora.rank=2000", "`actor.lora.rank` (2000) is larger than the model's k_proj, 1024 x 4096"),
    (DENSE, "moe.dispatcher=deepep", "`actor.moe.dispatcher=deepep` is for experts, and the model has none"),
    (DENSE, "moe.routing_replay=rollout", "`actor.moe.routing_replay=rollout` is for experts, and the model has none"),
    (DENSE, "overlap=true logging.gradient_variance_every=1", "needs gradients that are not summed over ranks yet"),
    (DENSE, "rollout.tensor_parallel=3", "must be a multiple of `rollout.tensor_parallel` (3)"),
    (DENSE, "rollout.tensor_parallel=16", "`rollout.tensor_parallel` (16) must divide the 8 processes of a node"),
    (DENSE, "rollout.expert_parallel=true", "`rollout.expert_parallel` is true, but the model has no experts"),
    (
        DENSE,
        "trainer.minibatches=7",
        "`trainer.prompts_per_step` (256) must be a multiple of `trainer.minibatches` (7)",
    ),
    (DENSE, "trainer.prompts_per_step=3 rollout.group_size=1 trainer.minibatches=1", "for 8 data-parallel ranks"),
    (DENSE, "rollout.max_tokens=100000", "= 101024 exceeds the model's 40960 positions"),
    (
        EXPERTS,
        "parallel.tensor=2",
        "Megatron-Core trains experts with tensor parallelism only where sequences are split",
    ),
    (
        EXPERTS,
        "parallel.tensor=8 parallel.sequence=true",
        "the model's key/value heads (4) must be a multiple of `actor.par",
    ),
    (EXPERTS, "parallel.expert=3", "the model's 128 experts must be a multiple of `actor.parallel.expert` (3)"),
    (EXPERTS, "parallel.expert=64", "`actor.parallel.expert` (64) must divide the 32 ranks of a pipeline stage"),
    (
        EXPERTS,
        "parallel.expert=16 parallel.expert_tensor=4",
        "`actor.parallel.expert` x `expert_tensor` (16 x 4) must divide",
    ),
    (
        EXPERTS,
        "parallel.expert=1 moe.dispatcher=deepep",
        "exchanges tokens between ranks, and every rank has all experts",
    ),
    (EXPERTS, "parallel.pipeline=49", "the model's 48 layers cannot be spread over 49 stages"),
    (LARGE, "parallel.pipeline=8 parallel.virtual_pipeline=7", "94 layers do not divide over 7 model chunks per stage"),
    (
        LARGE,
        "parallel.context=64",
        "must be a multiple of actor.parallel.tensor x pipeline x context (2 x 8 x 64 = 1024)",
    ),
    (LARGE, "parallel.expert=32", "`actor.parallel.expert` (32) must divide the 16 ranks of a pipeline stage"),
    (("qwen3-235b-a22b", 15), "", "must be a multiple of actor.parallel.tensor x pipeline x context (2 x 8 x 2 = 32)"),
]


@pytest.mark.parametrize(("recipe", "changes", "reason"), BROKEN, ids=[f"{r[0]}-{c}" for r, c, _ in BROKEN])
def test_it_is_refused_with_the_reason(
    recipe: tuple[str, int], changes: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, nodes = recipe
    sections = ("rollout.", "trainer.", "logging.")
    words = changes.replace(", ", ",").replace(": ", ":").split()
    overrides = [word if word.startswith(sections) else f"actor.{word}" for word in words]
    overrides = [word.replace(",", ", ").replace(":", ": ") for word in overrides]
    assert main(["plan", str(SCALE / f"{name}.yaml"), "--nodes", str(nodes), "--exact", *overrides]) == 2
    captured = capsys.readouterr()
    assert reason in captured.err
    assert not captured.out
