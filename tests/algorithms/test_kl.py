"""KL estimators against their formulas in float64, in every dtype that log-probs come in."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.algorithms import kl_divergence, sequence_kl

FORMULAS = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "mse": lambda d: d * d / 2,
    "k3": lambda d: math.expm1(-d) + d,
    "abs": abs,
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values(name: str, dtype: torch.dtype) -> None:
    differences = [-20.0, -1.5, -0.25, 0.0, 0.5, 3.0]
    reference = torch.linspace(-4.0, -1.0, 6, dtype=dtype)
    actual = kl_divergence(reference + torch.tensor(differences, dtype=dtype), reference, name)
    assert actual.dtype == dtype
    expected = torch.tensor([FORMULAS[name](d) for d in differences], dtype=torch.float64)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-12 if dtype == torch.float64 else 2e-5, atol=1e-6)


def test_low_precision_log_probs_are_subtracted_in_float32() -> None:
    """-2.0078125 - (-1.9921875) is exact in float32; in bf16 the k2 of it would have 8 bits."""
    log_probs = torch.tensor([-2.015625], dtype=torch.bfloat16)
    reference = torch.tensor([-1.1015625], dtype=torch.bfloat16)
    value = kl_divergence(log_probs, reference, "k2")
    assert value.dtype == torch.float32
    assert float(value) == pytest.approx((log_probs.item() - reference.item()) ** 2 / 2, rel=1e-6)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 600.0), (torch.float32, 60.0)])
def test_k3_is_exact_up_to_its_bound_and_linear_beyond(dtype: torch.dtype, bound: float) -> None:
    d = torch.tensor([-bound + 1, -bound, -bound - 2], dtype=dtype)
    below, at, beyond = kl_divergence(d, torch.zeros_like(d), "k3").double().tolist()
    assert below == pytest.approx(math.expm1(bound - 1) - bound + 1, rel=1e-5)
    assert at == pytest.approx(math.expm1(bound) - bound, rel=1e-5)
    assert beyond == pytest.approx(3 * math.exp(bound), rel=1e-5)  # value and slope at the bound: exp(bound)


def test_gradients_are_finite_and_point_back_to_the_reference() -> None:
    d = torch.tensor([-1e3, -20.0, -1e-4, 0.0, 1e-4, 3.0, 1e3], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros_like(d)
    assert torch.equal(kl_divergence(d, zero, "k2"), kl_divergence(d, zero, "mse"))
    assert torch.equal(kl_divergence(d, zero, "abs"), d.abs())
    assert torch.equal(kl_divergence(d, zero, "k1"), d)
    k3 = kl_divergence(d, zero, "k3")
    assert (k3 >= 0).all()
    assert float(k3[2].detach()) == pytest.approx(0.5e-8, rel=1e-3)
    torch.testing.assert_close(k3[1].detach(), torch.tensor(math.exp(20) - 21, dtype=torch.float64))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        leaf = d.detach().to(dtype).requires_grad_()
        value = kl_divergence(leaf, zero.to(dtype), "k3")
        assert torch.isfinite(value).all()
        value.sum().backward()
        assert leaf.grad is not None
        assert torch.isfinite(leaf.grad).all()
        assert (leaf.grad[:2] < 0).all()  # far below the reference the pull is upwards, however far
        assert (leaf.grad[-2:] > 0).all()


def test_sequence_kl() -> None:
    ids = torch.tensor([0, 0, 2])
    old, ref = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -1.0, -3.25])
    assert sequence_kl(old, ref, ids).tolist() == [-0.5, 0.0, 0.25]
    assert sequence_kl(old, ref, ids, "abs").tolist() == [1.5, 0.0, 0.25]


def test_unknown_estimator_is_named() -> None:
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'; there is abs, k1, k2, k3, mse"):
        kl_divergence(torch.zeros(1), torch.zeros(1), "k4")


def test_sequence_kl_of_no_tokens() -> None:
    none = torch.zeros(0)
    assert sequence_kl(none, none, torch.zeros(0, dtype=torch.int64)).shape == (0,)
