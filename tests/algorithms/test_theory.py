"""The papers' formulas against independent values, and the claims about them that hold."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from reproduced import theory as t

from megatron_rl.algorithms import RewardTable, make_surrogate

CASES = json.loads((Path(__file__).parent / "golden_theory.json").read_text())


def table(rewards: list[list[float]]) -> RewardTable:
    width = max(map(len, rewards))
    values = torch.tensor([[*group, *[math.nan] * (width - len(group))] for group in rewards], dtype=torch.float64)
    return RewardTable(values[:, :, None], ("r",), ~values.isnan())


def run(fn: str, kwargs: dict[str, Any]) -> Any:
    tensors = {
        key: torch.tensor(kwargs[key], dtype=torch.float64) for key in ("pi", "pi_old", "adv", "w") if key in kwargs
    }
    rest = {key: value for key, value in kwargs.items() if key not in tensors and key != "rewards"}
    match fn:
        case "ln_bias":
            return t.ln_bias(**kwargs)
        case "dgpo_constants":
            return [each.tolist() for each in t.dgpo_constants(tensors["pi_old"], **rest)]
        case "w_dgpo":
            return t.dgpo_probability_weight(tensors["pi"], tensors["pi_old"], tensors["adv"], **rest).tolist()
        case "f_aspo_eq6":
            weight = t.aspo_eq6(tensors["w"].log(), tensors["adv"], **rest)
            return {"F": weight.tolist(), "coef": (weight * tensors["adv"]).tolist()}
        case "lr_scale":
            return t.scaled_learning_rate(**kwargs)
        case "js1_lambda":
            return t.js1_lambda(table(kwargs["rewards"]))
        case "js1_baseline":
            return t.js1_baseline(table(kwargs["rewards"]), kwargs["lam"]).tolist()
        case "shrinkage_oracle_lambda":
            return t.oracle_lambda(kwargs["n"], kwargs["m"], kwargs["mean_sigma2"], kwargs["var_mu"])
        case "awpo_kappa_min":
            return t.awpo_kappa_min(**kwargs)
        case "awpo_clip_radius":
            return t.awpo_clip_radius(**kwargs)
    raise NotImplementedError(fn)


def assert_close(actual: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        for key, value in expected.items():
            assert_close(actual[key], value)
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        for a, b in zip(actual, expected, strict=True):
            assert_close(a, b)
    else:
        assert actual == pytest.approx(expected, rel=1e-9, abs=1e-10)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_golden(case: dict[str, Any]) -> None:
    assert_close(run(case["fn"], case["kwargs"]), case["expected"])


@pytest.mark.parametrize("gamma", [0.0, 1.5, 8.0])
@pytest.mark.parametrize(
    ("method", "weight", "params"),
    [
        ("grpo", "clip", {}),
        ("grpo", "aspo", {}),
        ("cispo", "cispo", {}),
        ("cispo", "gppo", {}),
        ("ce", "ce_gppo", {}),
        ("dgpo", "dgpo", {"n": 1}),
        ("dgpo", "dgpo", {"n": 3}),
    ],
)
def test_left_bias_is_the_integral_of_the_weights_we_train_with(
    method: str, weight: str, params: dict[str, int], gamma: float
) -> None:
    steps = 200_000
    ratio = (torch.arange(steps, dtype=torch.float64) + 0.5) * (0.8 / steps)
    factor = make_surrogate(weight, **params)(ratio.log(), -torch.ones_like(ratio))
    integral = float(((factor - ratio).abs() * ratio**gamma).sum()) * 0.8 / steps
    assert t.ln_bias(method, gamma, **params) == pytest.approx(integral, rel=1e-6)


def test_unknown_bias() -> None:
    with pytest.raises(ValueError, match="there are grpo, cispo"):
        t.ln_bias("ppo", 1.0)


@pytest.mark.parametrize("eps", [1e-6, 1e-2, 1.0])
def test_lemma_3_1(eps: float) -> None:
    generator = torch.Generator().manual_seed(0)
    outcome = torch.randn(200, 8, generator=generator, dtype=torch.float64)
    reasoning = torch.rand(200, 8, generator=generator, dtype=torch.float64)
    mixed, anchor, perturbation, residual = t.awpo_decomposition(outcome, reasoning, eps)
    torch.testing.assert_close(anchor + perturbation + residual, mixed)
    assert residual.abs().max() < 3 * eps


def test_aspo_as_eq6_prints_it() -> None:
    """Region by region with the printed bounds 0.2, 0.2, 0.33 and 3.0, close to either side of every threshold."""
    expected = {
        1.0: [(0.66, 0.67), (0.68, 1 / 0.68), (1.0, 1.0), (1.19, 1 / 1.19), (1.21, 0.0), (5.0, 0.0)],
        -1.0: [(0.1, 0.0), (0.79, 0.0), (0.81, 1 / 0.81), (1.21, 1 / 1.21), (3.99, 1 / 3.99), (4.01, 4.0)],
        0.0: [(0.5, 2.0), (2.0, 0.5)],
    }
    for advantage, points in expected.items():
        ratio, weight = torch.tensor(points, dtype=torch.float64).T
        torch.testing.assert_close(t.aspo_eq6(ratio.log(), torch.full_like(ratio, advantage)), weight)


def test_lemma_3_1_in_plain_loops() -> None:
    """Each term by itself: that they sum to A_mix would not see a standard deviation that is wrong in all of them."""
    outcome, reasoning, eps = [[1.0, 0.0, 0.0], [3.0, 1.0, 4.0]], [[0.5, 0.1, 0.9], [0.2, 0.6, 0.1]], 0.05
    terms = t.awpo_decomposition(*(torch.tensor(each, dtype=torch.float64) for each in (outcome, reasoning)), eps)
    for row, (out, judge) in enumerate(zip(outcome, reasoning, strict=True)):
        mix = [a + b for a, b in zip(out, judge, strict=True)]
        s_out, s_mix = statistics.pstdev(out), statistics.pstdev(mix)
        for column in range(3):
            a_out = (out[column] - statistics.mean(out)) / (s_out + eps)
            expected = (
                (mix[column] - statistics.mean(mix)) / (s_mix + eps),
                s_out / s_mix * a_out,
                (judge[column] - statistics.mean(judge)) / (s_mix + eps),
                a_out * ((s_out + eps) / (s_mix + eps) - s_out / s_mix),
            )
            assert [float(term[row, column]) for term in terms] == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_shrinkage_without_noise_is_zero() -> None:
    """Also where the prompts' means do not differ, 0 / 0 in the formulas."""
    assert t.oracle_lambda(4, 3, 0.0, 0.0) == t.oracle_lambda(4, 3, 0.0, 2.0) == 0.0
    assert t.oracle_lambda(4, 3, 2.0, 0.0) == pytest.approx(3 / 4)
    assert t.js1_lambda(table([[1.0, 1.0], [0.0, 0.0]])) == t.js1_lambda(table([[1.0], [1.0]])) == 0.0
    assert t.js1_lambda(table([[1.0, 0.0]])) == 1.0  # one prompt: its mean has no spread


def test_dgpos_bias_is_that_of_n_1() -> None:
    assert t.ln_bias("dgpo", 1.5) == t.ln_bias("dgpo", 1.5, n=1) != t.ln_bias("dgpo", 1.5, n=2)
