"""The weights' way into the engines: bit for bit what whole tensors bring, and every fault on it is named."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import tiny
from models.cut_by_hand import model_of
from models.megatron import spawn

from megatron_rl.config.actor import ParallelConfig
from megatron_rl.runtime.distributed import ALONE
from megatron_rl.weights.layouts import ActorLayout, EngineLayout
from megatron_rl.weights.sync_plan import make_plan
from megatron_rl.weights.transfer import SyncError, Transfer

from . import moving
from .moving import Layout

TWO = [
    Layout("qwen3", tensor=2, engine=2),
    Layout("qwen2-tied", pipeline=2, virtual=2),
    Layout("llama", pipeline=2, engine=2),
    Layout("qwen3_5", tensor=2),
    Layout("qwen3_moe", expert=2, engine=2),
    Layout("qwen3_moe", expert_tensor=2, engine=2, whole_experts=True),
    Layout("qwen3-tied", tensor=1, engine=1),
    Layout("gpt_oss", tensor=2, expert=2, engine=2),
]
FOUR = [
    Layout("qwen2-tied", tensor=2, engine=2),
    Layout("qwen2", tensor=2, pipeline=2, engine=4),
    Layout("llama3", tensor=4, engine=2),
    Layout("qwen3_moe", expert=4, engine=4),
    Layout("qwen3_moe", expert=4, engine=2, whole_experts=True),
    Layout("qwen3_moe", tensor=2, expert=2, expert_tensor=2, engine=4, whole_experts=True),
    Layout("qwen3-tied", pipeline=4),
    Layout("qwen3_5_moe", pipeline=2, tensor=2, expert=2, engine=2, whole_experts=True),
]


FAULTS = {2: 8, 4: 6}  # in each layout


@pytest.fixture(scope="module", params=[2, 4], ids=["2 processes", "4 processes"])
def faults(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What was said to each fault, after syncs that left the right bits in every engine."""
    folder, layouts = tmp_path_factory.mktemp("transfer"), TWO if request.param == 2 else FOUR
    for variant in {layout.variant for layout in layouts}:
        tiny.write(folder / variant, variant)
    spawn(moving.exact, request.param, folder, str(folder), layouts, FAULTS[request.param])
    return json.loads((folder / "faults.json").read_text())


@pytest.mark.parametrize("times", [0, 2])
def test_a_plan_that_brings_too_little_or_too_much_of_a_weight_is_refused(times: int) -> None:
    model = model_of("Qwen3ForCausalLM")
    plan = make_plan(model, ActorLayout.of(ParallelConfig(), 5, 1), EngineLayout(1), bucket_elements=10**6, node=1).of(
        0
    )
    weights: Any = {(0, -1, -1): torch.nn.Parameter(torch.zeros(1))}
    *others, last = plan.buckets[-1].copies

    def begin(count: int) -> None:
        changed = replace(plan.buckets[-1], copies=[*others, *[last] * count])
        of_rank = replace(plan, buckets=(*plan.buckets[:-1], changed))
        actor = ActorLayout.of(ParallelConfig(), 5, 1)
        planned: Any = SimpleNamespace(model=model, actor=actor, engine=EngineLayout(1), of=lambda _: of_rank)
        Transfer(planned, weights, torch.float32, ALONE, timedelta(seconds=1))

    begin(1)
    with pytest.raises(SyncError, match=r"the plan of the weight sync brings \d+ of \d+ elements of model\.layers"):
        begin(times)


@pytest.mark.ranks
def test_every_fault_is_named_on_all_ranks(faults: list[dict[str, Any]]) -> None:
    assert len(faults) >= 48
    assert {fault["kind"] for fault in faults} == set(moving.KINDS)
    assert {fault["expected"][2] for fault in faults} == {"pack", "send or receive", "load", "copy"}
    for fault in faults:
        tensor, route, stage = fault["expected"]
        for said in fault["said"]:
            assert f"a weight sync went wrong: {tensor} is not in the engine as the actor has it" in said, fault
            assert route in said, fault
            assert said.endswith(f"was changed at the stage: {stage}"), fault


@pytest.mark.ranks
def test_a_rank_that_is_gone_is_named_within_the_deadline(tmp_path: Path) -> None:
    tiny.write(tmp_path / "qwen3", "qwen3")
    spawn(moving.gone, 2, tmp_path, str(tmp_path))
    told = json.loads((tmp_path / "gone.json").read_text())
    assert "ranks 1 and 0 have different plans of what the first sends" in told["another plan"]
    for case, why in (("stopped", "Timed out waiting 2000ms"), ("ended", "")):
        seconds, _, said = told[case].partition(" s: a weight sync went wrong: ")
        assert int(seconds) < 20
        assert re.match(
            r"(receive|send) of model\.\S+, (rows|columns) \d+ to \d+, and \d+ more parts \(bucket [0-2] of ", said
        ), said
        assert "from rank 1 to rank 0) failed: " in said or "from rank 0 to rank 1) failed: " in said
        assert why in said
