"""Whole steps in three modes, checkpoints and failures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.planning.simulation.engines import EngineSpeed
from megatron_rl.planning.simulation.failures import (
    CheckpointInterval,
    Failures,
    daly,
    goodput,
    intervals,
    saves,
    young,
)
from megatron_rl.planning.simulation.simulated_steps import (
    MODES,
    Latency,
    Resampling,
    SimulatedJob,
    SimulatedRun,
    simulate,
)
from megatron_rl.planning.time.lengths import LogNormal, Recorded, read_lengths

SPEED = EngineSpeed(lambda running, context: 0.02 + 1e-7 * running * context, lambda tokens: tokens / 2e4, 2e5, 256)


def training(tokens: float) -> Mapping[str, float]:
    return {"old_log_prob": tokens * 1e-5, "update": tokens * 4e-5, "sync": 2.0}


JOB = SimulatedJob(
    speed=SPEED,
    engines=8,
    gpus=16,
    prompts=64,
    count=8,
    prompt=100,
    lengths=LogNormal(800, 0.8, 4000),
    training=training,
)


def test_without_spread_every_step_is_the_mean() -> None:
    run = simulate(replace(JOB, lengths=LogNormal(500, 0, 4000)), "synchronous", 3, seed=0)
    alone = 8 * 8 * 500  # tokens of an engine: 8 groups of 8
    passes = sum(SPEED.decode_seconds(64, 100 + done) for done in range(1, 501))
    generation = passes + SPEED.prefill_seconds(8 * 100)
    tokens = 64 * 8 * 600
    assert run.seconds == pytest.approx([generation + 5e-5 * tokens + 2.0] * 3)
    assert run.idle("generate") == pytest.approx(0, abs=1e-9)
    assert run.tail_share == pytest.approx(0, abs=1e-9)
    assert run.tokens_per_s_per_gpu == pytest.approx(tokens / run.seconds[0] / 16)
    assert alone * 8 == tokens - 64 * 8 * 100


def test_lengths_have_the_mean_they_are_given() -> None:
    for spread, limit in ((0.4, 10_000), (1.2, 3000)):
        lengths = LogNormal(1000, spread, limit)
        tokens, expected = lengths.draw(np.random.default_rng(0), 4000, 16)
        assert tokens.mean() == pytest.approx(1000, rel=0.02)
        assert tokens.max() <= limit
        within = np.corrcoef(expected, tokens.mean(1))[0, 1]
        assert within > 0.7  # prompts differ, so earlier responses tell of later ones
    with pytest.raises(ValueError, match="at most 900 tokens"):
        LogNormal(1000, 0.5, 900)


def test_the_same_seed_gives_the_same_run() -> None:
    for mode in MODES:
        one, again, other = (simulate(JOB, mode, 3, seed) for seed in (1, 1, 2))
        assert one.seconds.tolist() == again.seconds.tolist()
        assert one.seconds.tolist() != other.seconds.tolist()


def spans_fit(run: SimulatedRun) -> None:
    for step in run.steps:
        assert max(span.begin + span.seconds for span in step.spans) == pytest.approx(step.seconds)


def test_what_the_other_modes_would_give() -> None:
    runs = {mode: simulate(JOB, mode, 10, seed=0) for mode in MODES}
    for run in runs.values():
        spans_fit(run)
    synchronous, partial, ahead = (runs[mode] for mode in ("synchronous", "partial", "one step off"))
    # No longer the longest response: those go on in the next step.
    assert partial.phases()["generate"].mean() < 0.9 * synchronous.phases()["generate"].mean()
    assert partial.idle("generate") < synchronous.idle("generate")
    # As many groups are trained on; short ones are not preferred in the long run.
    assert np.mean([step.tokens for step in partial.steps]) == pytest.approx(
        np.mean([step.tokens for step in synchronous.steps]), rel=0.1
    )
    for step in ahead.steps:
        [update] = [span.seconds for span in step.spans if span.name == "update"]
        assert update == pytest.approx(training(step.tokens)["update"] / (1 - ahead.engines_share))  # on fewer GPUs
        longest = max(
            sum(
                span.seconds
                for span in step.spans
                if (span.name == "generate") == generates and span.name not in ("sync", "wait")
            )
            for generates in (True, False)
        )
        assert step.seconds == pytest.approx(longest + 2.0)
    assert 0 < ahead.engines_share < 1
    with pytest.raises(ValueError, match="two engines"):
        simulate(replace(JOB, engines=1), "one step off", 2, seed=0)


def test_engines_that_are_done_take_passes_off_the_step() -> None:
    plain, under = (simulate(JOB, mode, 6, seed=0) for mode in ("synchronous", "passes under the tail"))
    free = np.array([step.generation.idle_share * step.generation.seconds for step in plain.steps])
    left = np.maximum(0, plain.phases()["old_log_prob"] - free)
    assert under.phases().get("old_log_prob", np.zeros(6)) == pytest.approx(left)
    assert under.phases()["update"] == pytest.approx(plain.phases()["update"])
    alone = simulate(replace(JOB, engines=1), "passes under the tail", 2, seed=0)
    assert alone.phases()["old_log_prob"].min() > 0  # it is never done before the others
    tight = simulate(replace(JOB, cache_beside=2e4), "passes under the tail", 6, seed=0)
    assert (
        tight.phases()["generate"].mean() > 1.1 * plain.phases()["generate"].mean()
    )  # the weights take the cache's room


def test_steps_of_like_lengths_have_an_epochs_prompts() -> None:
    job = replace(JOB, lengths=LogNormal(800, 0.8, 4000, between=0.9), drawn_before=True)
    plain, sorted_ = (simulate(job, mode, 10, seed=0) for mode in ("synchronous", "steps of like lengths"))
    tokens = [step.tokens for step in sorted_.steps]
    assert sum(tokens) == pytest.approx(sum(step.tokens for step in plain.steps))
    assert tokens == sorted(tokens, reverse=True)
    assert sorted_.seconds.sum() < 0.95 * plain.seconds.sum()


def test_groups_that_are_replaced() -> None:
    """Round by round each round has its tail; ahead the same groups are trained on, most of the time after one draw."""
    assert simulate(replace(JOB, resampling=Resampling(0.7, 0, False)), "synchronous", 3, seed=0).seconds.mean() < (
        simulate(JOB, "synchronous", 3, seed=0).seconds.mean()
    )  # fewer are trained on
    rule = Resampling(0.7, 5, ahead=False)
    slow, fast = (
        simulate(replace(JOB, resampling=each), "synchronous", 8, seed=0) for each in (rule, replace(rule, ahead=True))
    )
    assert [step.tokens for step in slow.steps] == [step.tokens for step in fast.steps]
    for run in (slow, fast):
        spans_fit(run)
    one = simulate(JOB, "synchronous", 8, seed=0).phases()["generate"].mean()
    assert slow.phases()["generate"].mean() == pytest.approx(2 * one, rel=0.1)
    assert fast.phases()["generate"][1:].mean() < 1.5 * one
    same = simulate(replace(JOB, resampling=Resampling(1.0, 0, ahead=True)), "synchronous", 3, seed=0)
    assert same.seconds.tolist() == simulate(JOB, "synchronous", 3, seed=0).seconds.tolist()


def test_a_judge_is_waited_for_only_at_the_end() -> None:
    fast = simulate(replace(JOB, reward=Latency(3.0, 0.0, 10_000)), "synchronous", 4, seed=0)
    assert fast.phases()["reward"] == pytest.approx([3.0] * 4)  # the last response's own answer
    assert fast.idle("reward") == 1
    slow = simulate(replace(JOB, reward=Latency(3.0, 0.0, 2)), "synchronous", 4, seed=0)
    served = 64 * 8 * 3.0 / 2  # as long as two servers take for all
    total = slow.phases()["reward"] + slow.phases()["generate"]
    assert (total >= served).all()
    assert total == pytest.approx([served] * 4, rel=0.03)


def test_goodput_is_what_a_long_job_keeps() -> None:
    seconds = simulate(JOB, "synchronous", 10, seed=0).seconds
    failures = Failures(between=4 * 3600, restart=300, blocked=20, write=60)
    whole, steps = saves(np.resize(seconds, 100_000), 40, failures)
    lasts = np.random.default_rng(0).exponential(failures.between, 20_000)  # of each start, until it fails
    saved = np.searchsorted(whole, lasts, side="right")
    kept = np.concatenate([[0.0], steps])[saved].sum()
    assert kept / (lasts + failures.restart).sum() == pytest.approx(goodput(seconds, 40, failures), rel=0.02)


def test_goodput_where_hardly_anything_fails() -> None:
    """As the sum over all saves has it; and as fast for a job that fails once in a million years."""
    seconds, failures = np.array([50.0, 90.0, 70.0]), Failures(between=3e5, restart=600, blocked=3, write=40)
    held = np.cumsum(np.resize(seconds, 90_000))[6::7]
    whole = held + 3 * np.arange(1, len(held) + 1) + 40
    kept = np.diff(held, prepend=0.0) @ np.exp(-whole / 3e5) / 300_600
    assert goodput(seconds, 7, failures) == pytest.approx(kept, rel=1e-5)
    rare = replace(failures, between=3e13)
    assert goodput(seconds, 7, rare) == pytest.approx(1 - 3 / (7 * 70), rel=1e-2)
    assert max(one.goodput for one in intervals(seconds, rare)) > 0.999


@pytest.mark.parametrize(("hours", "blocked"), [(2, 10.0), (12, 60.0), (50, 20.0)])
def test_the_best_interval_is_youngs_and_dalys(hours: float, blocked: float) -> None:
    failures = Failures(between=3600 * hours, restart=600, blocked=blocked, write=0.0)
    seconds = np.full(1, 10.0)
    best = max(intervals(seconds, failures), key=lambda interval: interval.goodput)
    assert best.goodput == pytest.approx(goodput(seconds, round(daly(failures) / 10), failures), abs=2e-4)
    assert best.steps * 10 == pytest.approx(young(failures), rel=0.25)
    assert daly(failures) == pytest.approx(young(failures), rel=0.1)
    # First-order loss: the saves, half an interval per failure, the restart.
    lost = blocked / young(failures) + young(failures) / 2 / failures.between + 600 / failures.between
    assert best.goodput == pytest.approx(1 - lost, abs=0.015)


def test_no_checkpoint_in_time_leaves_nothing() -> None:
    failures = Failures(between=1000.0, restart=0, blocked=1.0, write=0.0)
    assert goodput(np.full(1, 100.0), 1, failures) == pytest.approx(
        0.1 * sum(math.exp(-0.101 * i) for i in range(1, 200)), rel=1e-3
    )
    assert goodput(np.full(1, 100.0), 10_000, failures) == pytest.approx(0, abs=1e-9)
    late = replace(failures, write=500.0)  # whole 500 s later, and no more often
    assert goodput(np.full(1, 100.0), 1, late) < 0.7 * goodput(np.full(1, 100.0), 1, failures)
    assert intervals(np.full(1, 100.0), failures)[0] == CheckpointInterval(1, goodput(np.full(1, 100.0), 1, failures))


def test_a_runs_recorded_lengths(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    for step in (10, 2):
        np.savez(tmp_path / "rollouts" / f"step_{step}.npz", lengths=np.full((2, 4), float(step)))
    (tmp_path / "rollouts" / "step_x.npz").touch()  # none of the run's
    steps = read_lengths(tmp_path)
    assert [tokens.tolist() for tokens in steps] == [[[2] * 4] * 2, [[10] * 4] * 2]
    tokens, expected = Recorded(tuple(group for step in steps for group in step)).draw(np.random.default_rng(0), 50, 8)
    assert set(tokens.ravel().tolist()) == {2, 10}
    assert (tokens == expected[:, None]).all()  # a prompt's own
    with pytest.raises(ValueError, match="no recorded rollouts"):
        read_lengths(tmp_path / "rollouts")
    (tmp_path / "bad.npz").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"bad\.npz cannot be read"):
        read_lengths(tmp_path / "bad.npz")
