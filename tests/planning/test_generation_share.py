"""Recipes that do not draw a step's groups at once and to their ends: `plan` predicts what their generation takes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_rl.cli import main
from megatron_rl.planning.simulation import generation_share

PLAN = (
    "plan",
    "recipes/scale/qwen3-32b.yaml",
    "--nodes",
    "16",
    "--response-tokens",
    "2048,0.5",
    "trainer.prompts_per_step=64",
)
PARTIAL = ("rollout.partial.chunk_tokens=1024", "algorithm.resample_rounds=0")
LIKE = ("trainer.like_lengths=6", "algorithm.resample_rounds=0")


def figures(capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    assert main([*PLAN, "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


def steps_of(found: Any) -> list[float]:
    return [one["step_time"]["seconds"]["step"] for one in found["layouts"]]


def test_a_plain_step_is_not_simulated(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_share, "simulate", None)
    assert figures(capsys)["step_time"]["generation_share"] == 1


def test_the_share_is_what_a_longer_simulation_says(capsys: pytest.CaptureFixture[str]) -> None:
    plain = figures(capsys, "algorithm.resample_rounds=0")["step_time"]["seconds"]
    for recipe, mode, more in ((PARTIAL, "partial", ()), (LIKE, "steps of like lengths", ("--drawn-before",))):
        found = figures(capsys, *recipe, "--simulate", "--simulated-steps", "12", *more)
        share, seconds = found["step_time"]["generation_share"], found["step_time"]["seconds"]
        assert share < 0.97
        assert seconds["generate"] == pytest.approx(share * plain["generate"])
        assert seconds["update"] == plain["update"]
        simulated = found["simulation"]
        gained = simulated["synchronous"]["seconds"] - simulated[mode]["seconds"]
        assert plain["step"] - seconds["step"] == pytest.approx(gained, rel=0.35), mode


def test_dynamic_sampling_by_the_share_of_groups_with_a_signal(capsys: pytest.CaptureFixture[str]) -> None:
    plain, some = (figures(capsys, *share)["step_time"] for share in ((), ("--signal-share", "0.6")))
    assert some["generation_share"] > 1.1
    assert some["seconds"]["generate"] == pytest.approx(some["generation_share"] * plain["seconds"]["generate"])
    assert main([*PLAN, "--signal-share", "0.6"]) == 0
    line = next(one for one in capsys.readouterr().out.splitlines() if "times a plain step's" in one)
    assert line.startswith(f"generate: {some['generation_share']:.2f} times")
    assert "(algorithm.resample_rounds)" in line


def test_layouts_are_found_by_it_and_engines_of_a_kind_simulated_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[tuple[int, float]]()
    simulate = generation_share.simulate

    def counted(job: Any, mode: Any, *rest: int) -> Any:
        asked.append((job.engines, job.speed.cache_tokens))
        return simulate(job, mode, *rest)

    monkeypatch.setattr(generation_share, "simulate", counted)
    own, other = figures(capsys, *PARTIAL, "--search"), figures(capsys, *PARTIAL[1:], "--search")
    assert steps_of(own)[0] < 0.9 * steps_of(other)[0]
    assert len({engines for engines, _ in asked}) > 1
    assert len(asked) < 60, "each is asked for a share of its own"
