"""What must hold for any rewards and any ratios."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.algorithms import (
    RewardTable,
    list_advantage_estimators,
    list_surrogates,
    make_advantage_estimator,
    make_surrogate,
    regions,
)

NAMES = ("outcome", "judge")
quick = settings(max_examples=25, deadline=None)
rewards = st.sampled_from([0.0, 1.0, 0.5, -3.0, 2.6, 0.1]) | st.floats(-10, 10)


@st.composite
def tables(draw: st.DrawFn, ragged: bool = True) -> RewardTable:
    n, m = draw(st.integers(2, 5)), draw(st.integers(2, 5))
    values = torch.tensor(draw(st.lists(rewards, min_size=n * m * 2, max_size=n * m * 2)), dtype=torch.float64)
    valid = torch.ones(n, m, dtype=torch.bool)
    if ragged:
        sizes = torch.tensor(draw(st.lists(st.integers(2, m), min_size=n, max_size=n)))
        valid = torch.arange(m)[None, :] < sizes[:, None]
    lengths = torch.tensor(draw(st.lists(st.integers(1, 50), min_size=n * m, max_size=n * m))).reshape(n, m)
    greedy = torch.tensor(draw(st.lists(rewards, min_size=n * 2, max_size=n * 2)), dtype=torch.float64).reshape(n, 2)
    return RewardTable(values.reshape(n, m, 2), NAMES, valid, {"outcome": 1.0, "judge": 0.5}, lengths, greedy)


def changed(table: RewardTable, **fields: object) -> RewardTable:
    parts = {
        "values": table.values,
        "names": table.names,
        "valid": table.valid,
        "weights": table.weights,
        "lengths": table.lengths,
        "greedy": table.greedy,
    }
    return RewardTable(**(parts | fields))  # type: ignore[arg-type]


def advantages(name: str, table: RewardTable, **params: object) -> Tensor:
    return make_advantage_estimator(name, **params)(table).advantages


def assert_same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", list_advantage_estimators())
@quick
@given(table=tables(), seed=st.integers(0, 99))
def test_permuting_rollouts_and_relabelling_prompts_permutes_advantages(
    name: str, table: RewardTable, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    n, m = table.mask.shape
    prompts = torch.randperm(n, generator=generator)
    rollouts = torch.stack([torch.randperm(m, generator=generator) for _ in range(n)])

    def move(tensor: Tensor) -> Tensor:
        picked = torch.stack([row[order] for row, order in zip(tensor, rollouts, strict=True)])
        return picked[prompts]

    assert table.lengths is not None
    assert table.greedy is not None
    moved = changed(
        table,
        values=move(table.values),
        valid=move(table.mask),
        lengths=move(table.lengths),
        greedy=table.greedy[prompts],
    )
    assert_same(advantages(name, moved), move(advantages(name, table)))


@pytest.mark.parametrize("name", list_advantage_estimators())
@quick
@given(table=tables(), shift=st.floats(-100, 100))
def test_shift_invariance(name: str, table: RewardTable, shift: float) -> None:
    """A constant added to all rewards changes nothing: to the judge's only, for AWPO's thresholds are absolute."""
    offset = torch.tensor([0.0, shift]) if name == "awpo" else torch.tensor([shift, -2 * shift])
    assert table.greedy is not None
    moved = changed(table, values=table.values + offset, greedy=table.greedy + offset)
    before, after = advantages(name, table), advantages(name, moved)
    size = max(1.0, abs(shift))
    # Near-constant groups may become constant when rounding on the offset swallows their differences.
    if _well_separated(table, 1e-9 * size):
        torch.testing.assert_close(before, after, rtol=1e-5, atol=1e-5)


def _well_separated(table: RewardTable, gap: float) -> bool:
    weighted = table.values * torch.tensor([1.0, 0.5], dtype=torch.float64)
    for rows in (table.values[..., 0], table.values[..., 1], weighted.sum(2)):
        for row, live in zip(rows, table.mask, strict=True):
            differences = (row[live][:, None] - row[live][None, :]).abs()
            if ((differences > 0) & (differences < 1e3 * gap)).any():
                return False
    return True


@pytest.mark.parametrize("name", list_advantage_estimators())
@quick
@given(table=tables())
def test_finite_and_zero_where_invalid(name: str, table: RewardTable) -> None:
    for dtype in (torch.float64, torch.float32):
        assert table.greedy is not None
        result = advantages(name, changed(table, values=table.values.to(dtype), greedy=table.greedy.to(dtype)))
        assert torch.isfinite(result).all()
        assert (result[~table.mask] == 0).all()


@pytest.mark.parametrize("name", list_advantage_estimators())
@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e90])
def test_no_nan_at_extreme_scales(name: str, scale: float) -> None:
    values = torch.tensor([[[0.0, 1.0], [1.0, 0.5]], [[2.0, 1.0], [1.0, 3.0]], [[1.0, 1.0], [1.0, 1.0]]]).double()
    table = RewardTable(values * scale, NAMES, greedy=values[:, 0] * scale)
    assert torch.isfinite(advantages(name, table)).all()


@quick
@given(table=tables(), at=st.tuples(st.integers(0, 1), st.integers(0, 1)), value=st.floats(-100, 100))
def test_shrinkage_baseline_does_not_see_its_own_reward(table: RewardTable, at: tuple[int, int], value: float) -> None:
    i, j = at
    single = changed(table, values=table.values[:, :, :1], names=("outcome",), weights=None, greedy=None)
    values = single.values.clone()
    values[i, j, 0] = value
    before = single.values[i, j, 0] - advantages("shrinkage", single)[i, j]
    after = values[i, j, 0] - advantages("shrinkage", changed(single, values=values))[i, j]
    assert float(after) == pytest.approx(float(before), rel=1e-9, abs=1e-9)


@quick
@given(table=tables(ragged=False), scale=st.floats(0.01, 100))
def test_scale_freedom(table: RewardTable, scale: float) -> None:
    scaled = changed(table, values=table.values * scale)
    single = "grpo", "gdpo"
    for name in single:
        assert_same(advantages(name, table, eps=0.0), advantages(name, scaled, eps=0.0))
    a, b = (make_advantage_estimator("shrinkage")(each).group["shrinkage"] for each in (table, scaled))
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert (a >= 0).all()
    assert (a <= (len(a) - 1) / len(a) + 1e-12).all()


@quick
@given(table=tables(ragged=False), scale=st.floats(0.01, 100))
def test_gdpo_depends_on_the_ratio_of_weights_only(table: RewardTable, scale: float) -> None:
    scaled = changed(table, weights={"outcome": scale, "judge": 0.5 * scale})
    torch.testing.assert_close(
        advantages("gdpo", table, batch_eps=0.0), advantages("gdpo", scaled, batch_eps=0.0), rtol=1e-6, atol=1e-6
    )


@quick
@given(table=tables(ragged=False))
def test_rloo_is_scaled_dr_grpo(table: RewardTable) -> None:
    m = table.values.shape[1]
    assert_same(advantages("rloo", table), advantages("dr_grpo", table) * m / (m - 1))


@quick
@given(table=tables())
def test_awpo_decomposition(table: RewardTable) -> None:
    """AWPO Lemma 3.1: A_mix = (s_out / s_mix) A_out + centred judge / (s_mix + eps) + Delta."""
    eps = 1e-6
    plain = changed(table, weights=None)
    group = make_advantage_estimator("awpo", eps=eps)(plain).group
    out = changed(plain, values=plain.values[:, :, :1], names=("outcome",), greedy=None)
    judge = changed(plain, values=plain.values[:, :, 1:], names=("judge",), greedy=None)
    a_out = advantages("grpo", out, ddof=0, eps=eps)
    a_mix = advantages("grpo", changed(plain, greedy=None), ddof=0, eps=eps)
    s_out, s_mix = group["sigma_out"][:, None], group["sigma_mix"][:, None]
    live = (s_mix > 1e-6)[:, 0]
    s_mix = s_mix.clamp(min=1e-30)
    delta = a_out * ((s_out + eps) / (s_mix + eps) - s_out / s_mix)
    rebuilt = s_out / s_mix * a_out + advantages("dr_grpo", judge) / (s_mix + eps) + delta
    torch.testing.assert_close(a_mix[live], rebuilt[live], rtol=1e-6, atol=1e-6)


# ----------------------------------------------------------------------------------------------------- surrogates
log_ratios = st.sampled_from([0.0, math.log(0.8), math.log(1.2), 35.0, -35.0, 1e3, -1e3]) | st.floats(-1e3, 1e3)
signs = st.sampled_from([0.0, 1.0, -1.0]) | st.floats(-5, 5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", list_surrogates())
@quick
@given(pairs=st.lists(st.tuples(log_ratios, signs), min_size=1, max_size=8))
def test_weights_are_finite_in_every_branch(name: str, dtype: torch.dtype, pairs: list[tuple[float, float]]) -> None:
    log_ratio, adv = torch.tensor(pairs).T.to(dtype)
    for params in ({}, {"n": 2, "m": 1}) if name == "dgpo" else ({},):
        weight = make_surrogate(name, **params)(log_ratio, adv)
        assert weight.shape == log_ratio.shape
        assert weight.dtype == dtype
        assert not weight.requires_grad
        assert torch.isfinite(weight).all()
        assert (weight >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list_surrogates())
def test_gradients_are_finite_at_huge_ratios(name: str, dtype: torch.dtype) -> None:
    """log w = 35 with n = 2 gives NaN where the branch not taken overflows."""
    log_probs = torch.tensor([35.0, -35.0, 1e3, -1e3] * 2, dtype=dtype, requires_grad=True)
    adv = torch.tensor([1.0] * 4 + [-1.0] * 4, dtype=dtype)
    params = {"n": 2} if name == "dgpo" else {}
    weight = make_surrogate(name, **params)(log_probs - torch.zeros(8, dtype=dtype), adv)
    (-(weight * adv) * log_probs).float().sum().backward()
    assert log_probs.grad is not None
    assert torch.isfinite(log_probs.grad).all()


@pytest.mark.parametrize("name", list_surrogates())
@quick
@given(pairs=st.lists(st.tuples(st.floats(-3, 3), signs), min_size=1, max_size=8))
def test_autograd_of_the_surrogate(name: str, pairs: list[tuple[float, float]]) -> None:
    """Gradient of -stopgrad(F) A log pi is -F A grad log pi, for any weight."""
    log_ratio, adv = torch.tensor(pairs, dtype=torch.float64).T
    logits = torch.stack([log_ratio, torch.zeros_like(log_ratio)], 1).requires_grad_()
    log_probs = torch.log_softmax(logits, 1)[:, 0]
    weight = make_surrogate(name)(log_probs - log_probs.detach() + log_ratio, adv)
    (got,) = torch.autograd.grad((-(weight * adv) * log_probs).sum(), logits, retain_graph=True)
    score = torch.stack(
        [torch.autograd.grad(value, logits, retain_graph=True)[0][i] for i, value in enumerate(log_probs)]
    )
    torch.testing.assert_close(got, -(weight * adv)[:, None] * score)


def test_clip_has_ppos_gradient() -> None:
    """F A is the derivative of min(w A, clip(w) A) with respect to log w, dual clip included."""
    grid = torch.linspace(-2, 2, 401, dtype=torch.float64)
    for adv in (1.3, -0.7):
        for dual in (None, 2.5):
            log_ratio = grid.clone().requires_grad_()
            ratio = log_ratio.exp()
            value = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.28) * adv)
            if dual is not None and adv < 0:
                value = torch.maximum(value, torch.tensor(dual * adv, dtype=torch.float64))
            (expected,) = torch.autograd.grad(value.sum(), log_ratio)
            weight = make_surrogate("clip", eps_high=0.28, dual_clip=dual)(grid, torch.full_like(grid, adv))
            torch.testing.assert_close(weight * adv, expected)


def test_dual_clip_leaves_positive_advantages_alone() -> None:
    at = torch.tensor([math.log(4.0)])
    weight = make_surrogate("clip", eps_high=5.0, dual_clip=3.0)
    assert float(weight(at, torch.ones(1))) == pytest.approx(4.0)
    assert float(weight(at, -torch.ones(1))) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bounds_themselves_are_inside(dtype: torch.dtype) -> None:
    """DGPO's Table 1 is strict, also where log(1 - eps) is rounded differently here and there."""
    for step in range(1, 200):
        eps = step / 250
        at = torch.tensor([1 - eps, 1 + eps], dtype=torch.float64).log()
        for nearby in (at, at * (1 + 2.0**-53), at * (1 - 2.0**-53)) if dtype == torch.float32 else (at,):
            codes = regions(nearby.to(dtype), torch.tensor([-1.0, 1.0], dtype=dtype), eps, eps)
            assert codes.tolist() == [0, 0]
        beyond = at * (1 + 1e-5)
        assert regions(beyond.to(dtype), torch.tensor([-1.0, 1.0], dtype=dtype), eps, eps).tolist() == [1, 2]


def test_dgpo_is_continuous_and_decays() -> None:
    for n, m in ((1, 2), (2, 2), (3, 1)):
        weight = make_surrogate("dgpo", n=n, m=m)
        for bound, adv, sign in ((math.log(0.8), -1.0, -1), (math.log(1.2), 1.0, 1)):
            at = torch.tensor([bound - sign * 1e-9, bound + sign * 1e-9], dtype=torch.float64)
            inside, outside = weight(at, torch.full_like(at, adv))
            assert float(inside) == pytest.approx(float(outside), rel=1e-7)
        small = torch.tensor([-5.0, -10.0, -20.0], dtype=torch.float64)
        shrinking = weight(small, -torch.ones_like(small)) / small.exp()
        assert (shrinking.diff() < 0).all()
    high = torch.tensor([0.5, 3.0], dtype=torch.float64)
    ones = torch.ones_like(high)
    assert torch.equal(make_surrogate("dgpo", m=1)(high, ones), make_surrogate("gppo")(high, ones))


def test_gppo_continues_with_the_weight_of_its_own_bounds() -> None:
    log_ratio, advantages = torch.tensor([math.log(0.1), math.log(9.0)]), torch.tensor([-1.0, 1.0])
    weight = make_surrogate("gppo", eps_low=0.3, eps_high=0.4)
    assert weight(log_ratio, advantages).tolist() == pytest.approx([0.7, 1.4])


@pytest.mark.parametrize("name", list_surrogates())
def test_a_half_precision_ratio_is_weighed_in_float32(name: str) -> None:
    weight, log_ratio = make_surrogate(name), torch.linspace(-3, 3, 301).bfloat16()
    for sign in (1.0, -1.0):
        advantages = torch.full_like(log_ratio, sign)
        assert torch.equal(weight(log_ratio, advantages), weight(log_ratio.float(), advantages.float()).bfloat16())


def test_clip_range_replaces_the_bounds_of_any_weight() -> None:
    log_ratio, adv = torch.tensor([0.25, -0.25]), torch.tensor([1.0, -1.0])
    for name in list_surrogates():
        weight = make_surrogate(name)
        own = make_surrogate(name, **({"eps_low": 0.4, "eps_high": 0.4} if weight.clip_range else {}))
        assert torch.equal(weight(log_ratio, adv, clip_range=(0.4, 0.4)), own(log_ratio, adv))
    assert not torch.equal(make_surrogate("clip")(log_ratio, adv), make_surrogate("clip")(log_ratio, adv, (0.4, 0.4)))
