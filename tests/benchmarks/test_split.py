"""Idle shares and the law that the benchmark of split placement holds them against."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.split import (
    ALL_AT_ONCE,
    MODES,
    Turn,
    Unit,
    empty,
    figures,
    is_crowded,
    law,
    misses,
    places_of,
    split_figures,
    submitted_by,
    tau,
    tau_of,
    turns,
    units,
    waits,
)
from megatron_rl.config.rollout_keys import PartialConfig
from megatron_rl.planning.simulation.engines import EngineSpeed, generate, joined
from megatron_rl.planning.simulation.simulated_steps import SimulatedJob, SimulatedRun, SimulatedStep, Span, simulate
from megatron_rl.planning.time.lengths import LogNormal

LENGTHS = np.array([[2, 4], [6, 12]])
JOB = SimulatedJob(
    EngineSpeed(lambda running, _: 1.0, lambda tokens: 0.0, 1e9, 64),
    2,
    2,
    8,
    4,
    0.0,
    LogNormal(20, 1.0, 100),
    lambda tokens: {"update": 30.0, "sync": 2.0},
    partial=PartialConfig(chunk_tokens=10),
)


def test_tau_is_of_means_over_steps() -> None:
    assert tau([np.array([2, 4, 6, 12])]) == pytest.approx(2.0)
    assert tau([np.array([2, 4, 6, 12]), np.array([1, 1, 2, 4])]) == pytest.approx(8 / 4)
    assert tau([np.array([5, 5])]) == 1.0


def test_the_law_is_one_minus_one_over_tau_with_a_place_for_each() -> None:
    unit = Unit(4, 12, 24)
    assert law([unit], 4) == pytest.approx(1 - 1 / tau([LENGTHS]))
    assert law([unit], 8) == pytest.approx(0.75)
    assert law([unit], 2) == pytest.approx(0.0)  # 12 passes are enough
    assert law([unit], 1) == pytest.approx(0.0)  # and here 24 are needed
    assert law([unit, Unit(4, 8, 8)], 4) == pytest.approx(1 - 32 / (4 * 20))
    assert is_crowded([Unit(2, 1, 2), unit], 3)
    assert not is_crowded([Unit(2, 1, 2), unit], 4)


def test_what_was_submitted_together_is_read_from_the_sequences_under_way() -> None:
    first = generate(ALL_AT_ONCE, 1, 0.0, np.zeros_like(LENGTHS), np.minimum(LENGTHS, 5), range(2))
    rest = np.maximum(LENGTHS - 5, 0)
    second = generate(ALL_AT_ONCE, 1, 0.0, np.minimum(LENGTHS, 5), rest, range(2))
    assert units(first) == [Unit(4, 5, 16)]
    assert units(joined([first, second])) == [Unit(4, 5, 16), Unit(2, 7, 8)]


def test_simulated_engines_follow_the_law() -> None:
    run = simulate(JOB, "synchronous", 3, 0)
    assert places_of(run) == 32
    assert empty(run) == pytest.approx(1 - 1 / tau_of(JOB, 3))
    assert empty(run) == pytest.approx(law(submitted_by(JOB, "synchronous", 3), 32))
    split = simulate(JOB, "one step off", 3, 0)
    assert empty(split) == pytest.approx(empty(run))
    chunks = submitted_by(JOB, "partial", 3)
    assert max(unit.longest for unit in chunks) == 10
    assert law(chunks, max(unit.count for unit in chunks)) < empty(run)
    crowded = replace(JOB, speed=replace(JOB.speed, max_concurrent=4))
    assert law(submitted_by(crowded, "synchronous", 3), 8) <= empty(simulate(crowded, "synchronous", 3, 0)) < empty(run)


def test_figures_say_how_far_off_an_engine_is_unless_it_is_crowded() -> None:
    least = 1 - 1 / tau_of(JOB, 3)
    found = figures("one step off", JOB, 3, 32, least, 0.9 * least)
    assert found["mode"] == MODES["one step off"] == "split"
    assert (found["off_passes"], found["off_seconds"]) == (0.0, -0.1)
    assert "off_passes" not in figures("synchronous", JOB, 3, 31, least, least)


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        ({"mode": "split", "off_passes": 0.1, "off_seconds": -0.1, "beyond": 0.1}, 0),
        ({"mode": "split", "off_passes": 0.11, "off_seconds": -0.11, "beyond": 0.11}, 3),
        ({"mode": "partial", "off_passes": 0.15, "off_seconds": -0.16}, 1),
        ({"mode": "partial", "crowded": True, "law": 0.2, "empty_passes": 0.6}, 0),
        ({"mode": "partial", "crowded": True, "law": 0.2, "empty_passes": 0.1}, 1),
    ],
)
def test_what_is_not_within_its_bound_is_told(found: dict[str, Any], missed: int) -> None:
    assert len(misses("here", found)) == missed


def row(time: float, generate: float, wait: float, sync: float) -> dict[str, float]:
    return {
        "time": time,
        "timing_s/generate": generate,
        "timing_s/reward": 0.5,
        "timing_s/wait": wait,
        "timing_s/sync": sync,
    }


def test_a_step_is_held_against_the_batch_that_is_drawn_meanwhile() -> None:
    rows = [row(10.0, 9.0, 9.0, 9.0), row(14.0, 9.0, 1.0, 0.25), row(19.0, 3.0, 0.0, 0.5), row(30.0, 1.5, 9.0, 9.0)]
    assert turns(rows) == [Turn(4.0, 3.5, 2.75, 1.0), Turn(5.0, 2.0, 4.5, 0.0)]
    assert split_figures(turns(rows)) == {
        "seconds_per_step": 4.5,
        "drawing": 2.75,
        "learning": 3.625,
        "learner_waits": 0.111,
        "job_idle": round(1 - 12.75 / 18, 3),
        "job_idle_by_theory": round(3.25 / 16, 3),
        "beyond": 0.125,
    }


def test_what_a_simulated_job_loses() -> None:
    """Half of the GPUs draw for 12 of 20 seconds, with half of their places empty, then wait for 6; the sync takes 2."""
    generation = generate(replace(ALL_AT_ONCE, max_concurrent=4), 1, 0.0, np.zeros_like(LENGTHS), LENGTHS, range(2))
    spans = Span("generate", 0.0, 12.0, 0.5), Span("update", 0.0, 18.0, 0.5), Span("wait", 12.0, 6.0, 0.5, 1.0)
    step = SimulatedStep(20.0, (*spans, Span("sync", 18.0, 2.0)), generation, 24.0)
    assert waits(SimulatedRun("one step off", 8, [step], 0.5)) == {
        "job_idle": (0.5 * 12 * 0.5 + 0.5 * 6) / 20,
        "seconds_per_step": 20.0,
        "engines_share": 0.5,
        "waits": 0.3,
        "beyond": round(20 / 18 - 1, 4),
    }
