"""From a step's raw rewards to what is trained on: shaping columns, dropped groups, truncated rollouts."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.algorithms import (
    RewardTable,
    add_column,
    count_advantage_groups,
    groups_with_variance,
    make_advantage_estimator,
    make_algorithm,
    overlong_penalty,
)
from megatron_rl.algorithms.diagnostics import GradientVariance, reward_metrics


def table(rewards: list[list[float]], **fields: object) -> RewardTable:
    return RewardTable(torch.tensor(rewards, dtype=torch.float64)[:, :, None], ("r",), **fields)  # type: ignore[arg-type]


def test_overlong_penalty() -> None:
    lengths = torch.tensor([0, 80, 90, 100, 120])
    assert overlong_penalty(lengths, 100, 0.2).tolist() == pytest.approx([0.0, 0.0, -0.5, -1.0, -1.0])
    for share, words in ((0.0, "share"), (1.5, "share")):
        with pytest.raises(ValueError, match=words):
            overlong_penalty(lengths, 100, share)
    with pytest.raises(ValueError, match="max_length"):
        overlong_penalty(lengths, 0, 0.5)


def test_overlong_shaping_enters_the_estimate_but_not_the_signal() -> None:
    algorithm = make_algorithm(
        {
            "estimator": {"name": "dr_grpo"},
            "overlong": {"share": 0.5, "weight": 2.0},
            "drop_zero_variance_groups": True,
        },
        max_tokens=10,
    )
    lengths = torch.tensor([[5, 10], [5, 10]])
    step = algorithm.compute_advantages(table([[1.0, 0.0], [1.0, 1.0]], lengths=lengths))
    assert step.has_variance.tolist() == [True, False]
    assert step.train.tolist() == [[True, True], [False, False]]
    assert step.advantages.tolist() == [[1.5, -1.5], [0.0, 0.0]]
    assert step.metrics["groups/signal_share"] == 0.5
    assert step.metrics["groups/trained"] == 1.0
    assert step.metrics["reward/overlong"] == -0.5
    assert step.metrics["reward_signal_share/overlong"] == 1.0
    assert step.metrics["reward_group_std/overlong"] == 0.5
    with pytest.raises(ValueError, match="lengths"):
        algorithm.compute_advantages(table([[1.0, 0.0]]))


def test_kl_in_the_reward() -> None:
    algorithm = make_algorithm({"estimator": {"name": "dr_grpo"}, "kl": {"reward_coef": 0.5}})
    assert algorithm.needs_reference
    given = table([[1.0, 1.0]])
    step = algorithm.compute_advantages(given, reference_kl=torch.tensor([[0.0, 2.0]]))
    assert step.advantages.tolist() == [[0.5, -0.5]]
    assert step.metrics["reward/kl"] == -1.0
    with pytest.raises(ValueError, match="reference_kl"):
        algorithm.compute_advantages(given)


def test_truncated_rollouts() -> None:
    given, cut = table([[1.0, 0.0, 0.5]]), torch.tensor([[False, False, True]])
    keep, mask, drop = (
        make_algorithm({"estimator": {"name": "dr_grpo"}, "truncated": how}) for how in ("keep", "mask", "drop")
    )
    assert keep.compute_advantages(given).train.all()
    masked = mask.compute_advantages(given, truncated=cut)
    assert masked.train.tolist() == [[True, True, False]]
    assert masked.advantages.tolist() == [[0.5, -0.5, 0.0]]  # their rewards still count in the group
    dropped = drop.compute_advantages(table([[1.0, 0.0, 5.0]]), truncated=cut)
    assert dropped.train.tolist() == [[True, True, False]]
    assert dropped.advantages.tolist() == [[0.5, -0.5, 0.0]]
    assert dropped.metrics["rollouts/truncated_share"] == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="say which rollouts were cut"):
        mask.compute_advantages(given)


def test_groups_too_small_for_the_estimator_leave() -> None:
    valid = torch.tensor([[True, True], [True, False]])
    step = make_algorithm("shrinkage").compute_advantages(table([[0.0, 1.0], [1.0, math.nan]], valid=valid))
    assert step.train.tolist() == [[True, True], [False, False]]
    assert step.metrics["groups/incomplete"] == 1.0


@pytest.mark.parametrize("preset", ["grpo", "gdpo", "shrinkage"])
def test_nothing_left_to_train_on(preset: str) -> None:
    algorithm = make_algorithm({"preset": preset, "drop_zero_variance_groups": True})
    step = algorithm.compute_advantages(table([[1.0, 1.0], [0.0, 0.0]]))
    assert not step.train.any()
    assert (step.advantages == 0).all()
    assert step.metrics["groups/trained"] == 0.0


def test_signal_is_judged_on_the_named_columns_of_non_zero_weight() -> None:
    values = torch.tensor([[[1.0, 0.0], [1.0, 9.0]], [[0.0, 0.0], [1.0, 0.0]]])
    both = RewardTable(values, ("task", "length"))
    assert groups_with_variance(both).tolist() == [True, True]
    assert groups_with_variance(both, ["task"]).tolist() == [False, True]
    assert groups_with_variance(RewardTable(values, ("task", "length"), weights={"length": 0.0})).tolist() == [
        False,
        True,
    ]
    with pytest.raises(ValueError, match="acc"):
        groups_with_variance(both, ["acc"])


def test_added_columns() -> None:
    given = table([[1.0, 0.0]], greedy=torch.tensor([[0.5]], dtype=torch.float64))
    wider = add_column(given, "kl", torch.tensor([[1.0, 2.0]]), 0.25)
    assert wider.names == ("r", "kl")
    assert wider.weight("kl") == 0.25
    assert wider.greedy is not None
    assert wider.greedy.tolist() == [[0.5, 0.0]]
    with pytest.raises(ValueError, match="rename"):
        add_column(wider, "kl", torch.zeros(1, 2), 1.0)
    with pytest.raises(ValueError, match="must be"):
        add_column(given, "kl", torch.zeros(2, 2), 1.0)


def test_state_goes_through_the_algorithm() -> None:
    values = torch.tensor([[[1.0, 0.5], [2.0, 0.0]]])
    algorithm, other = make_algorithm("awpo"), make_algorithm("awpo")
    algorithm.compute_advantages(RewardTable(values, ("outcome", "judge")))
    other.load_state_dict(algorithm.state_dict())
    assert other.state_dict() == {"estimator": "awpo", "state": {"r_out_max": 1.5}}
    with pytest.raises(ValueError, match="'awpo', the recipe's 'grpo'"):
        make_algorithm("grpo").load_state_dict(algorithm.state_dict())


def test_reward_and_advantage_diagnostics() -> None:
    values = torch.tensor([[[1.0, 3.0], [0.0, 3.0]], [[1.0, 3.0], [1.0, 3.0]]])
    metrics = reward_metrics(RewardTable(values, ("task", "format")))
    assert metrics["reward/task"] == 0.75
    assert metrics["reward_signal_share/task"] == 0.5
    assert metrics["reward_signal_share/format"] == 0.0
    assert metrics["reward_group_std/task"] == 0.25
    advantages = make_advantage_estimator("grpo")(table([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]])).advantages
    assert count_advantage_groups(advantages, torch.ones(3, 2, dtype=torch.bool)) == 2
    step = make_algorithm("grpo").compute_advantages(table([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]]))
    assert step.metrics["advantage/distinct_groups"] == 2.0
    assert step.metrics["advantage/silent_group_share"] == pytest.approx(1 / 3)


def test_gradient_variance_needs_two() -> None:
    tracker = GradientVariance()
    tracker.add(1.0)
    with pytest.raises(ValueError, match="at least 2"):
        tracker.value(1.0)


def test_gradient_variance_of_parts_of_different_sizes_is_unbiased() -> None:
    """Parts that are sums over different numbers of terms: on average the true variance of the whole sum."""
    generator = torch.Generator().manual_seed(0)
    sizes, mean = [1, 2, 5], torch.tensor([0.5, -0.2])
    terms = torch.randn(20_000, sum(sizes), 2, generator=generator, dtype=torch.float64) + mean
    squares = torch.stack([part.sum(1).square().sum(1) for part in terms.split(sizes, dim=1)], 1)
    whole = terms.sum(1).square().sum(1)
    estimates = []
    for each, total in zip(squares.tolist(), whole.tolist(), strict=True):
        tracker = GradientVariance()
        for square, size in zip(each, sizes, strict=True):
            tracker.add(square, size)
        estimates.append(tracker.of_sum(total))
    true_variance = sum(sizes) * 2.0  # 8 terms, 2 components of variance 1
    assert sum(estimates) / len(estimates) == pytest.approx(true_variance, rel=0.02)
