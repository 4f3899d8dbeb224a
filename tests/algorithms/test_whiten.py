"""Whitening over the batch, and the clipped objective's value, against their formulas in plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.methods.groups import whiten
from megatron_rl.methods.surrogates.clip import ppo_objective

VALUES = torch.tensor([[2.0, -1.0, 0.5], [7.0, 3.0, 99.0]], dtype=torch.float64)
VALID = torch.tensor([[True, True, True], [True, True, False]])
COUNTS = torch.tensor([[3, 1, 2], [1, 5, 7]])


@pytest.mark.parametrize("counts", [None, COUNTS])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps", [0.0, 1e-8, 0.5, 40.0])
@pytest.mark.parametrize("mode", ["std_add", "var_add", "var_clamp"])
def test_whitening(mode: str, eps: float, ddof: int, counts: torch.Tensor | None) -> None:
    weights = (torch.ones(2, 3) if counts is None else counts).double()[VALID].tolist()
    seen = VALUES[VALID].tolist()
    mean = sum(w * x for w, x in zip(weights, seen, strict=True)) / sum(weights)
    variance = sum(w * (x - mean) ** 2 for w, x in zip(weights, seen, strict=True)) / (sum(weights) - ddof)
    scale = {
        "std_add": math.sqrt(variance) + eps,
        "var_add": math.sqrt(variance + eps),
        "var_clamp": math.sqrt(max(variance, eps)),
    }[mode]
    result = whiten(VALUES, VALID, counts=counts, ddof=ddof, eps=eps, eps_mode=mode)
    assert result[VALID].tolist() == pytest.approx([(x - mean) / scale for x in seen], rel=1e-12)
    assert result[~VALID].tolist() == [0.0]


def test_centring_alone() -> None:
    result = whiten(VALUES, VALID, normalize=False)
    assert result.flatten().tolist() == pytest.approx([-0.3, -3.3, -1.8, 4.7, 0.7, 0.0], rel=1e-12)


def test_a_value_that_counts_zero_times_moves_nothing() -> None:
    counts = torch.tensor([[1, 1, 1], [1, 1, 0]])
    expected = whiten(VALUES, VALID)
    actual = whiten(VALUES, torch.ones_like(VALID), counts=counts)
    assert actual[VALID].tolist() == pytest.approx(expected[VALID].tolist(), rel=1e-12)


def test_too_few_values_for_a_variance_are_silent() -> None:
    one = torch.tensor([5.0], dtype=torch.float64)
    assert whiten(one, torch.tensor([True]), ddof=1).tolist() == [0.0]
    two = torch.tensor([5.0, 6.0], dtype=torch.float64)
    assert whiten(two, torch.tensor([True, True]), ddof=2).tolist() == [0.0, 0.0]
    assert whiten(two, torch.tensor([False, False])).tolist() == [0.0, 0.0]


def test_noise_is_judged_by_the_size_of_the_terms() -> None:
    """Values that are small differences of large terms: what is signal beside 1 is rounding noise beside 1e6."""
    values = torch.tensor([0.0, 1e-10], dtype=torch.float64)
    valid = torch.tensor([True, True])
    assert whiten(values, valid, eps=0.0).abs().min() > 0
    assert whiten(values, valid, eps=0.0, size=torch.tensor([1e6, 1.0])).tolist() == [0.0, 0.0]


def test_unknown_mode_is_named() -> None:
    with pytest.raises(ValueError, match="std_add, var_add or var_clamp, not 'sum'"):
        whiten(VALUES, VALID, eps_mode="sum")


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_clipped_objective(dual_clip: float | None) -> None:
    """PPO's min, and dual clip's floor c A where A < 0; 0.5 < A < 1 and a large ratio are beyond both clips."""
    ratios, advantages = [0.2, 0.9, 1.1, 2.0, 8.0], [-2.0, -0.5, 0.0, 0.5, 2.0]
    for ratio in ratios:
        for advantage in advantages:
            expected = min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
            if dual_clip is not None and advantage < 0:
                expected = max(expected, dual_clip * advantage)
            value = ppo_objective(
                torch.tensor([math.log(ratio)], dtype=torch.float64),
                torch.tensor([advantage], dtype=torch.float64),
                0.2,
                0.28,
                dual_clip,
            )
            assert float(value) == pytest.approx(expected, rel=1e-12)
