"""Numbers that are logged and not trained on, each against its definition: a wrong gauge misleads like a wrong loss."""

from __future__ import annotations

import itertools
import pickle
import statistics

import pytest
import torch
from reproduced.theory import awpo_clip_radius

from megatron_rl.algorithms import (
    GradientVariance,
    RewardTable,
    correct,
    count_advantage_groups,
    distinct_advantage_groups,
    make_advantage_estimator,
)
from megatron_rl.algorithms.correction import Correction, correction_metrics
from megatron_rl.algorithms.metrics import Metrics
from megatron_rl.algorithms.shaping import add_column, overlong_penalty
from megatron_rl.config.algorithm import CorrectionFilterConfig

OUTCOME = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
JUDGE = torch.tensor([[0.1, 0.0, 0.2], [0.2, 0.1, 0.0], [0.0, 1.0, 0.5], [0.3, 0.1, 0.2]], dtype=torch.float64)


def test_awpo_logs_what_it_used() -> None:
    """AWPO v2 Eq. 18-24 in plain loops; the judge's column is mixed in where the gate is open."""
    valid = torch.ones(5, 3, dtype=torch.bool)
    valid[4] = False  # a prompt without rollouts counts in no mean
    values = torch.stack([OUTCOME, JUDGE], 2)
    values = torch.cat([values, torch.full((1, 3, 2), 50.0, dtype=torch.float64)])
    estimator = make_advantage_estimator("awpo", eps_mix=0.6, tau_low=0.2, tau_high=0.9)
    result = estimator(RewardTable(values, ("outcome", "judge"), valid=valid))
    rho, w_mix, difficulty, sigma_out, sigma_mix = [], [], [], [], []
    for outcome, judge in zip(OUTCOME, JUDGE, strict=True):
        s_out, s_mix = outcome.std(correction=0), (outcome + judge).std(correction=0)
        rho.append(float(s_mix / (s_out + s_mix + 1e-6)))
        w_mix.append(rho[-1] if float(outcome.mean()) < 1.0 and rho[-1] < 0.6 else 0.0)
        difficulty.append(1.5 if 0.2 < float(outcome.mean()) < 0.9 else 0.5)
        sigma_out.append(float(s_out))
        sigma_mix.append(float(s_mix))
    mean_w = sum(w_mix) / 4
    assert 0 < sum(w > 0 for w in w_mix) < 4, "some gates are open and some are shut, or this shows little"
    assert result.metrics == pytest.approx(
        {
            "awpo/w_mix": mean_w,
            "awpo/clip_radius": 0.18 + (1 - mean_w) * 0.02,
            "awpo/r_out_max": 1.0,
            "awpo/rho": sum(rho) / 4,
            "awpo/difficulty": sum(difficulty) / 4,
            "awpo/gate_open_share": sum(w > 0 for w in w_mix) / 4,
            "awpo/sigma_out": sum(sigma_out) / 4,
            "awpo/sigma_mix": sum(sigma_mix) / 4,
        },
        rel=1e-12,
    )


def test_gradient_variance_is_equation_17() -> None:
    """1 / (b (b - 1)) sum |g_i - mean|^2, for two and for five micro-batches."""
    for count in (2, 5):
        gradients = [torch.tensor([float(i * i), 1.0 - i], dtype=torch.float64) for i in range(count)]
        mean = sum(gradients) / count
        expected = sum(float((g - mean).square().sum()) for g in gradients) / (count * (count - 1))
        tracker = GradientVariance()
        for gradient in gradients:
            tracker.add(float(gradient.square().sum()))
        of_sum = float(sum(gradients).square().sum())
        assert tracker.value(of_sum) == pytest.approx(expected, rel=1e-12)
        assert tracker.of_sum(of_sum) == pytest.approx(expected * count**2, rel=1e-12)


def test_gradient_variance_of_equal_gradients_is_zero() -> None:
    tracker = GradientVariance()
    for _ in range(3):
        tracker.add(1.0 - 1e-16)
    assert tracker.of_sum(9.0) == 0.0  # rounding must not make it negative, nor anything else


def test_mismatch_gauges_are_over_the_given_mask() -> None:
    ids = torch.tensor([0, 0, 1, 1, 2])
    mask = torch.tensor([True, False, True, True, False])  # rollout 2 has no live token
    old = torch.tensor([-1.0, 7.0, -2.0, -0.5, 3.0], dtype=torch.float64)
    rollout = torch.tensor([-1.4, 0.0, -1.9, -1.5, 0.0], dtype=torch.float64)
    correction = correct(old, rollout, mask, ids, weight="token", cap=1.4)
    values = correction_metrics(old, rollout, mask, ids, correction, 1.4).values()
    live = torch.tensor([0.4, -0.1, 1.0], dtype=torch.float64)
    weights = live.exp().clamp(max=1.4)
    assert values["mismatch/abs_log_ratio"] == pytest.approx(0.5)
    assert values["mismatch/abs_log_ratio_max"] == pytest.approx(1.0)
    assert values["mismatch/kl_k1"] == pytest.approx(-float(live.mean()))
    assert values["mismatch/kl_k3"] == pytest.approx(float((live.exp() - 1 - live).mean()))
    assert values["mismatch/log_perplexity_gap"] == pytest.approx(-(0.4 + 0.45) / 2)
    assert values["correction/weight"] == pytest.approx(float(weights.mean()))
    assert values["correction/weight_squared"] == pytest.approx(float(weights.square().mean()))
    assert values["correction/truncated_share"] == pytest.approx(2 / 3)  # a weight cut to the cap equals it
    assert values["correction/effective_sample_share"] == pytest.approx(
        float(weights.mean() ** 2 / weights.square().mean())
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_weight_that_was_cut_counts_as_cut(dtype: torch.dtype) -> None:
    """Whatever the precision in which the weights are cut makes of the cap."""
    old, rollout = torch.tensor([-3.0, -2.0, -2.0, 0.0, 3.0, 4.0], dtype=dtype), torch.zeros(6, dtype=dtype)
    mask, ids = torch.ones(6, dtype=torch.bool), torch.arange(6)
    for cap in [1 + i / 20 for i in range(1, 81)]:
        correction = correct(old, rollout, mask, ids, weight="token", cap=cap)
        values = correction_metrics(old, rollout, mask, ids, correction, cap).values()
        assert values["correction/truncated_share"] == pytest.approx(2 / 6), cap


def test_filters_keep_their_bounds() -> None:
    """A statistic that equals a bound passes."""
    old, rollout = torch.tensor([1.0, 2.0, 0.0]), torch.zeros(3)
    ids, mask = torch.arange(3), torch.ones(3, dtype=torch.bool)
    by_k1 = [CorrectionFilterConfig("token", "k1", low=-2.0, high=-1.0)]
    assert correct(old, rollout, mask, ids, filters=by_k1).mask.tolist() == [True, True, False]
    by_k2 = [CorrectionFilterConfig("token", "k2", low=0.5, high=2.0)]
    assert correct(old, rollout, mask, ids, filters=by_k2).mask.tolist() == [True, True, False]


def test_mismatch_by_position_counts_from_each_rollouts_first_token() -> None:
    lengths = (300, 5, 70)
    rollouts = [[(number, position) for position in range(length)] for number, length in enumerate(lengths)]
    tokens = [token for token in itertools.chain(*itertools.zip_longest(*rollouts)) if token is not None]  # interleaved
    ids, positions = torch.tensor(tokens).T
    log_ratio = torch.where(positions == 3, -5.0, positions.double())
    mask = positions != 17
    zeros = torch.zeros(len(ids), dtype=torch.float64)
    metrics = correction_metrics(log_ratio, zeros, mask, ids, Correction(None, mask), 2.0)
    values = {name.rpartition("_")[2]: value for name, value in metrics.values().items() if "_from_" in name}
    parts = {0: range(16), 16: range(16, 64), 64: range(64, 256), 256: range(256, 300)}
    assert values.keys() == {str(first) for first in parts}, "no response is longer"
    for first, part in parts.items():
        of_part = [5.0 if at == 3 else at for _, at in tokens if at in part and at != 17]
        assert values[str(first)] == pytest.approx(sum(of_part) / len(of_part)), first


def test_mismatch_of_low_precision_log_probs_is_taken_in_float32() -> None:
    old, rollout = (torch.tensor([value], dtype=torch.bfloat16) for value in (-2.015625, -1.1015625))
    weights = correct(old, rollout, torch.tensor([True]), torch.tensor([0]), weight="token").weights
    assert weights is not None
    assert weights.dtype == torch.float32
    assert float(weights) == pytest.approx(float((old.double() - rollout.double()).exp()), rel=1e-6)


def test_metrics_come_to_other_ranks_as_they_are() -> None:
    """With sums only, maxima only, or nothing; in float64, and in few bytes, which no tensor is."""
    where = torch.tensor([True])
    only_mean, only_max = Metrics(), Metrics()
    for name, value in (("a", 0.1), ("c", 0.2)):
        only_mean.mean(name, torch.tensor([value]), where)
    only_max.maximum("b", torch.tensor([0.1]), where)
    for metrics in (Metrics(), only_mean, only_max, only_mean + only_max):
        data = pickle.dumps(metrics)
        assert len(data) < 250
        there = pickle.loads(data)
        assert (there.sums, there.maxima) == (metrics.sums, metrics.maxima)
        tensors = [*itertools.chain(*there.sums.values()), *there.maxima.values()]
        assert {tensor.dtype for tensor in tensors} <= {torch.float64}


def test_overlong_penalty_takes_the_whole_budget_and_one_token() -> None:
    """DAPO Eq. 13 at its bounds."""
    assert overlong_penalty(torch.tensor([0, 5, 10]), 10, 1.0).tolist() == [0.0, -0.5, -1.0]
    assert overlong_penalty(torch.tensor([0, 1]), 1, 0.5).tolist() == [0.0, -1.0]
    for length, share in ((0, 0.5), (10, 0.0), (10, 1.5)):
        with pytest.raises(ValueError, match=r"algorithm\.overlong"):
            overlong_penalty(torch.tensor([1]), length, share)


def test_an_added_column_has_the_tables_dtype() -> None:
    table = RewardTable(torch.zeros(1, 2, 1, dtype=torch.float64), ("r",))
    assert add_column(table, "kl", torch.tensor([[1, 2]]), 1.0).values.dtype == torch.float64


def test_awpos_clip_radius_shrinks_with_the_mean_weight() -> None:
    """AWPO v2 Eq. 24 at weights of 0.5 and 0.1, with its default bounds."""
    assert awpo_clip_radius([0.5, 0.1]) == pytest.approx(0.18 + 0.7 * 0.02, rel=1e-12)
    assert awpo_clip_radius([1.0, 1.0, 1.0]) == pytest.approx(0.18, rel=1e-12)


def test_resolution_counts_what_differs_in_the_sixth_decimal() -> None:
    """By plain loops. GRPO's eps of 1e-6 tells groups of the same shape and another scale apart: in float32 it would not
    always, and without it these are 14 (GDPO Fig. 3)."""
    groups = set()
    for rewards in itertools.combinations_with_replacement(range(4), 4):
        mean, std = statistics.mean(rewards), statistics.stdev(rewards)
        groups.add(tuple(sorted(round((reward - mean) / (std + 1e-6), 6) for reward in rewards)))
    assert len(groups) == distinct_advantage_groups(4, 3, make_advantage_estimator("grpo")) == 17
    assert distinct_advantage_groups(4, 3, make_advantage_estimator("grpo", eps=0.0)) == 14
    assert count_advantage_groups(torch.tensor([[0.0, -0.0], [-1e-7, 0.0], [1e-6, 0.0]])) == 2
