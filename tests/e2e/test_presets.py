"""Every kind of method takes a real step: sampling, rewards, advantages, update, sync. And the sync finds what is damaged."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli import main

from . import inside
from .job import RECIPE, rows, write_recipe

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def steps(variants: Path) -> dict[str, dict[str, Any]]:
    return dict(zip(inside.VARIANTS, rows(variants), strict=True))


@pytest.fixture(scope="module")
def faults(variants: Path) -> dict[str, str]:
    return json.loads((variants / "faults.json").read_text())


@pytest.mark.parametrize("variant", inside.VARIANTS)
def test_a_step_trains(steps: dict[str, dict[str, Any]], variant: str) -> None:
    row = steps[variant]
    assert all(math.isfinite(value) for value in row.values()), row
    assert row["actor/updates"] == inside.MINIBATCHES.get(variant, RECIPE["trainer"]["minibatches"])
    if row["groups/signal_share"]:
        assert row["actor/grad_norm"] > 0
        assert row["advantage/abs_mean"] > 0
    assert row["sync/logprob_max_diff"] < 1e-4


def test_nearly_every_step_has_something_to_learn(steps: dict[str, dict[str, Any]]) -> None:
    """What is drawn, and so whether its groups have signal, depends on the CPU's kernels."""
    assert sum(row["groups/signal_share"] > 0 for row in steps.values()) >= 0.8 * len(steps)


@pytest.mark.parametrize("preset", ["grpo", "awpo", "gdpo", "dgpo", "shrinkage", "dapo", "remax"])
def test_the_recipe_takes_the_preset_by_one_override(tmp_path: Path, preset: str, capsys: Any) -> None:
    assert main(["train", str(write_recipe(tmp_path)), f"algorithm.preset={preset}", "--check"]) == 0
    assert f"preset: {preset}" in capsys.readouterr().out


def test_awpo_asks_for_the_judge_and_only_awpo(steps: dict[str, dict[str, Any]]) -> None:
    assert [name for name, row in steps.items() if "reward/judge" in row] == ["awpo"]


def test_dynamic_sampling_replaces_groups_without_signal(steps: dict[str, dict[str, Any]]) -> None:
    row = steps["dapo"]
    assert 1 <= row["rollouts/rounds"] <= 3
    assert 32 <= row["rollouts/sampled"] <= 96  # what is drawn ahead is no multiple of a round
    assert row["groups/signal_share"] == 1
    assert 1 <= row["groups/trained"] <= RECIPE["trainer"]["prompts_per_step"]
    assert "rollouts/rounds" not in steps["grpo"]


def test_kl_is_a_loss_term_or_a_reward(steps: dict[str, dict[str, Any]]) -> None:
    assert steps["kl loss"]["reference/kl_k2"] > 0
    assert "timing_s/ref_log_prob" in steps["kl reward"]
    assert not [name for name in steps["grpo"] if name.startswith("reference/") or "ref_log_prob" in name]


def test_filters_drop_what_the_engine_rounds_otherwise(steps: dict[str, dict[str, Any]]) -> None:
    row = steps["correction"]
    assert 0 < row["correction/dropped_share"] < 1
    # At 1e-8 those that differ at all: two neighbouring float32 near 1 are 6e-8 apart. Some are rounded alike.
    assert row["correction/weight"] == pytest.approx(1, abs=1e-5)
    assert "correction/weight" not in steps["grpo"]


def test_weights_that_come_while_a_request_holds_the_cache_are_refused(faults: dict[str, str]) -> None:
    assert "would mix keys and values of old weights with new ones" in faults["a request under way"]


def test_a_tensor_changed_on_its_way_is_named(faults: dict[str, str]) -> None:
    assert f"The first tensor that was changed on its way to the engine is {inside.SENT}." in faults["sent"]
    assert f"The first tensor that was not sent to the engine is {inside.KEPT}." in faults["not sent"]
    assert faults["pushed again"].startswith("good")


def test_weights_go_whole_into_an_engine_that_keeps_them_otherwise(faults: dict[str, str]) -> None:
    assert faults["another layout"].endswith(f": vLLM's {inside.KEPT} is (1,), where (64,) was expected")
    assert faults["whole"] == "WholeSync"


def test_a_layer_that_computes_with_another_copy_of_its_weight_is_named(faults: dict[str, str]) -> None:
    fused, own = (faults[name] for name in inside.PACKED)
    held = "the first that the engine holds otherwise is model.layers.1.self_attn.v_proj.weight"
    assert f"{held}, in the copy that vLLM packs for the CPU's kernels." in fused
    assert "but the engine's layer lm_head computes with something else: the copy of its weight that vLLM packs" in own


def test_a_tensor_that_one_rank_of_the_engine_lost_is_named(faults: dict[str, str]) -> None:
    for damage in ("kept", "not a number"):
        assert "rollout.sync_tolerance = 3e-05 allows" in faults[damage]
        assert "Every tensor was sent as the actor holds it" in faults[damage]
        assert f"the first that the engine holds otherwise is {inside.KEPT}." in faults[damage]
    assert "by up to nan" in faults["not a number"]
    assert faults["pushed at last"].startswith("good")


def test_a_side_that_does_not_compute_the_same_twice_is_named(faults: dict[str, str]) -> None:
    assert "what can be read back from the engine agrees: the two compute differently." in faults["once"]
    assert "Asked again, the engine answers as before but for 0.01 and the actor but for 0." in faults["once"]
