"""Layouts that Megatron-Core, Transformer Engine or vLLM cannot have: `plan --exact` says why, and builds nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.cli import main

SCALE = Path(__file__).parents[2] / "recipes" / "scale"
DENSE, EXPERTS, LARGE = ("qwen3-8b", 2), ("qwen3-30b-a3b", 4), ("qwen3-235b-a22b", 16)  # with nodes of 8
# What only these models, or several nodes, have; tests/config/test_model_checks.py has what any model has.
BROKEN = [
    (DENSE, "parallel.tensor=3", "the model's attention heads (32) must be a multiple of `actor.parallel.tensor` (3)"),
    (DENSE, "parallel.pipeline=2 parallel.virtual_pipeline=5", "36 layers do not divide over 5 model chunks per stage"),
    (DENSE, "fp8={recipe: mxfp8, param_gather: true}", "Megatron-Core's buffers cannot hold its parameters"),
    (DENSE, "fp8={param_gather: true} optimizer.distributed=false", "the plain optimizer knows no parameters in FP8"),
    (
        DENSE,
        "offload=false offload_weights=true",
        "`actor.offload_weights` without `actor.offload` leaves on the device",
    ),
    (EXPERTS, "parallel.tensor=2", "trains experts with tensor parallelism only where sequences are split"),
    (EXPERTS, "parallel.expert=3", "the model's 128 experts must be a multiple of `actor.parallel.expert` (3)"),
    (LARGE, "parallel.expert=32", "`actor.parallel.expert` (32) must divide the 16 ranks of a pipeline stage"),
    (("qwen3-235b-a22b", 15), "", "must be a multiple of actor.parallel.tensor x pipeline x context (2 x 8 x 2 = 32)"),
]


@pytest.mark.parametrize(("recipe", "changes", "reason"), BROKEN, ids=[f"{r[0]}-{c}" for r, c, _ in BROKEN])
def test_it_is_refused_with_the_reason(
    recipe: tuple[str, int], changes: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, nodes = recipe
    words = changes.replace(", ", ",").replace(": ", ":").split()
    overrides = [f"actor.{word}".replace(",", ", ").replace(":", ": ") for word in words]
    assert main(["plan", str(SCALE / f"{name}.yaml"), "--nodes", str(nodes), "--exact", *overrides]) == 2
    captured = capsys.readouterr()
    assert reason in captured.err
    assert not captured.out
