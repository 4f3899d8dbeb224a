"""Rewards without a value for some rollouts (a judge that did not answer): neither praise, nor blame, nor a zero."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms import RewardTable, list_advantage_estimators, make_advantage_estimator, make_algorithm
from megatron_rl.algorithms.diagnostics import reward_metrics
from megatron_rl.algorithms.shaping import add_column, groups_with_variance

NAMES = ("outcome", "judge")


def table(scored: Tensor, garbage: float = math.nan, n: int = 3, m: int = 6) -> RewardTable:
    generator = torch.Generator().manual_seed(5)
    values = torch.rand(n, m, 2, generator=generator, dtype=torch.float64).mul(4).round() / 4
    values[:, :, 1] = torch.where(scored, values[:, :, 1], garbage)
    mask = torch.stack([torch.ones_like(scored), scored], 2)
    lengths = torch.arange(1, n * m + 1).reshape(n, m)
    return RewardTable(values, NAMES, lengths=lengths, greedy=torch.zeros(n, 2), scored=mask)


def some(n: int = 3, m: int = 6) -> Tensor:
    """Group 0 is whole, group 1 lacks two scores, group 2 all of them."""
    scored = torch.ones(n, m, dtype=torch.bool)
    scored[1, 1] = scored[1, 4] = False
    scored[2] = False
    return scored


@pytest.mark.parametrize("name", list_advantage_estimators())
def test_what_stands_in_an_unscored_entry_does_not_matter(name: str) -> None:
    estimate = make_advantage_estimator(name)
    first = estimate(table(some())).advantages
    assert torch.equal(make_advantage_estimator(name)(table(some(), garbage=0.0)).advantages, first)
    assert torch.equal(make_advantage_estimator(name)(table(some(), garbage=1e6)).advantages, first)


@pytest.mark.parametrize("name", list_advantage_estimators())
def test_a_mask_that_is_true_everywhere_changes_nothing(name: str) -> None:
    whole = table(torch.ones(3, 6, dtype=torch.bool))
    plain = RewardTable(whole.values, NAMES, lengths=whole.lengths, greedy=whole.greedy)
    same = make_advantage_estimator(name)(whole).advantages
    assert torch.equal(make_advantage_estimator(name)(plain).advantages, same)


def test_nan_that_is_not_marked_is_refused() -> None:
    values = torch.ones(2, 2, 2)
    values[0, 0, 1] = math.nan
    with pytest.raises(ValueError, match="not scored"):
        RewardTable(values, NAMES)


def test_awpo_gives_an_unjudged_rollout_its_outcome_on_the_mixed_scale() -> None:
    given = table(some())
    estimate = make_advantage_estimator("awpo", r_out_max=100.0, eps_mix=1.0, alpha_base=1.0, alpha_prio=1.0)(given)
    w = estimate.group["w_mix"]
    assert w[0] > 0
    assert w[1] > 0
    assert w[2] == 0  # no score in the group: no say for the judge, and no tighter clip radius on its account
    assert estimate.metrics["awpo/w_mix"] == pytest.approx(float(w.mean()))
    outcome, judge = given.values[1, :, 0], given.values[1, :, 1]
    centred = torch.where(some()[1], judge - judge[some()[1]].mean(), 0.0)
    mixed = outcome - outcome.mean() + centred
    sigma_out, sigma_mix = outcome.std(correction=0), mixed.square().mean().sqrt()
    expected = (1 - w[1]) * (outcome - outcome.mean()) / (sigma_out + 1e-6) + w[1] * mixed / (sigma_mix + 1e-6)
    torch.testing.assert_close(estimate.advantages[1], expected, rtol=1e-9, atol=1e-9)
    assert abs(float(estimate.advantages[1].sum())) < 1e-9  # an unjudged rollout biases nobody
    alone = make_advantage_estimator("grpo", ddof=0)(RewardTable(given.values[:, :, :1], ("outcome",)))
    torch.testing.assert_close(estimate.advantages[2], alone.advantages[2], rtol=1e-9, atol=1e-9)


def test_a_missing_score_is_not_the_worst_one() -> None:
    """Two rollouts alike but for the judge's answer: zero would push the unanswered one down."""
    values = torch.tensor([[[1.0, 1.0], [1.0, 0.0], [0.0, 0.5], [1.0, math.nan]]], dtype=torch.float64)
    scored = torch.ones(1, 4, 2, dtype=torch.bool)
    scored[0, 3, 1] = False
    for name in ("grpo", "rloo", "gdpo", "dr_grpo"):
        best, worst, _, missing = make_advantage_estimator(name)(RewardTable(values, NAMES, scored=scored)).advantages[
            0
        ]
        assert worst < missing < best


def test_gdpo_normalises_a_reward_over_the_rollouts_that_have_it() -> None:
    values = torch.tensor([[[0.0, 1.0], [0.0, 0.0], [0.0, math.nan], [0.0, math.nan]]], dtype=torch.float64)
    scored = torch.ones(1, 4, 2, dtype=torch.bool)
    scored[0, 2:, 1] = False
    given = make_advantage_estimator("gdpo", batch_norm=False)(RewardTable(values, NAMES, scored=scored)).advantages
    torch.testing.assert_close(given, torch.tensor([[0.5**0.5, -(0.5**0.5), 0.0, 0.0]], dtype=torch.float64))


def test_metrics_and_signal_are_over_what_was_scored() -> None:
    given = table(some())
    metrics = reward_metrics(given)
    assert metrics["reward/judge"] == pytest.approx(float(given.values[:, :, 1][some()].mean()))
    nobody = table(torch.zeros(3, 6, dtype=torch.bool))
    assert "reward/judge" not in reward_metrics(nobody)
    assert not groups_with_variance(nobody, ["judge"]).any()
    assert groups_with_variance(given, ["judge"]).tolist() == [True, True, False]


def test_the_mask_survives_shaping_and_the_record(tmp_path: Path) -> None:
    from megatron_rl.algorithms import StepAdvantages
    from megatron_rl.trainer.record import read_step, write_step

    given = table(some())
    longer = add_column(replace(given, valid=given.mask), "kl", torch.zeros(3, 6), 1.0)
    assert longer.scored is not None
    assert given.scored is not None
    assert longer.scored[:, :, :2].equal(given.scored)
    assert longer.scored[:, :, 2].all()
    estimate = StepAdvantages(torch.zeros(3, 6), torch.zeros(3, 6, dtype=torch.bool), torch.ones(3, dtype=torch.bool))
    write_step(tmp_path / "s.npz", ["a", "b", "c"], given, torch.zeros(3, 6, dtype=torch.bool), estimate, parts=0)
    read = read_step(tmp_path / "s.npz").table
    assert read.scored is not None
    assert read.scored.equal(given.scored)
    assert (
        make_algorithm("awpo")
        .compute_advantages(read)
        .advantages.equal(make_algorithm("awpo").compute_advantages(given).advantages)
    )
