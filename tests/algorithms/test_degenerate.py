"""Degenerate input: what must come out, exactly, in float32 and float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms import RewardTable, list_advantage_estimators, make_advantage_estimator
from megatron_rl.methods.groups import Groups, leave_one_out

DTYPES = (torch.float32, torch.float64)
GROUPWISE = ("grpo", "dr_grpo", "rloo", "gdpo", "reinforce_pp_baseline")


def table(rewards: list[list[float]], dtype: torch.dtype = torch.float64, **fields: object) -> RewardTable:
    return RewardTable(torch.tensor(rewards, dtype=dtype)[:, :, None], ("r",), **fields)  # type: ignore[arg-type]


def with_judge(out: list[list[float]], judge: list[list[float]], dtype: torch.dtype = torch.float64) -> RewardTable:
    return RewardTable(torch.stack([torch.tensor(out), torch.tensor(judge)], 2).to(dtype), ("outcome", "judge"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.1, 2.6, -3.3, 123456.7, 1e-30])
@pytest.mark.parametrize("name", [*GROUPWISE, "shrinkage", "bloo", "reinforce_pp"])
def test_equal_rewards_give_exact_zeros(name: str, value: float, dtype: torch.dtype) -> None:
    advantages = make_advantage_estimator(name)(table([[value] * 16] * 3, dtype)).advantages
    assert advantages.dtype == dtype
    assert (advantages == 0).all()


@pytest.mark.parametrize("name", GROUPWISE)
def test_equal_sums_of_different_terms_are_no_signal(name: str) -> None:
    values = torch.tensor([[[0.1, 0.2], [0.2, 0.1], [0.3, 0.0]]], dtype=torch.float64)  # 0.1 + 0.2 != 0.3 in floats
    advantages = make_advantage_estimator(name)(RewardTable(values, ("a", "b"))).advantages
    if name != "gdpo":  # which looks at each reward by itself
        assert (advantages == 0).all()


def test_small_differences_on_a_large_offset_are_signal() -> None:
    advantages = make_advantage_estimator("grpo", eps=0.0)(table([[1e6, 1e6 + 1e-6]])).advantages
    assert advantages.tolist() == [pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])]


@pytest.mark.parametrize("name", ["rloo", "bloo", "shrinkage"])
def test_an_offset_of_all_rewards_costs_no_digits(name: str) -> None:
    rewards = [[0.5, -1.25, 0.75], [0.0, 0.125, 3.0], [-2.0, 0.25, 0.5]]  # exact with the offset added, too
    plain = make_advantage_estimator(name)(table(rewards)).advantages
    offset = make_advantage_estimator(name)(table([[2.0**30 + reward for reward in group] for group in rewards]))
    torch.testing.assert_close(offset.advantages, plain, rtol=0, atol=1e-14)


def test_one_huge_prompt_costs_the_others_no_digits() -> None:
    small = [[1e-6, 3e-6, -2e-6], [5e-6, 0.5e-6, 1e-6], [-4e-6, 2e-6, 2e-6]]
    alone = make_advantage_estimator("shrinkage")(table([*small, [1e-6] * 3])).group["shrinkage"][3]
    huge = make_advantage_estimator("shrinkage")(table([*small, [-3e8, 1e9, 2e9]])).group["shrinkage"][3]
    assert huge == pytest.approx(float(alone), rel=1e-12)


def test_float32_noise_is_no_signal_but_float64_differences_are() -> None:
    nearly = [[1.0, 1.0 + 1.2e-7]]
    assert (make_advantage_estimator("grpo", eps=0.0)(table(nearly, torch.float32)).advantages == 0).all()
    assert (make_advantage_estimator("grpo", eps=0.0)(table(nearly)).advantages != 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_silent_batch_is_not_amplified(dtype: torch.dtype) -> None:
    """Normalised rewards that cancel leave rounding noise, which GDPO's batch norm must not blow up."""
    values = torch.tensor([[[1, 0], [1, 0], [0, 1]]] * 4, dtype=dtype)
    row = torch.tensor([0.1, 0.7, 0.35], dtype=dtype)
    opposed = torch.stack([row, -3 * row, row / 7, -row], 1)[None]
    shifted = torch.stack([row, 26.3 - row], 1)[None]  # the difference is rounded to the digits of 26.3
    for params in ({}, {"batch_eps": 0.0}, {"batch_norm": False}):
        for given in (values, opposed, shifted):
            names = tuple(f"r{index}" for index in range(given.shape[2]))
            result = make_advantage_estimator("gdpo", **params)(RewardTable(given, names))
            assert (result.advantages == 0).all()


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "gdpo"])
def test_group_of_one(name: str) -> None:
    valid = torch.tensor([[True, False], [True, True]])
    result = make_advantage_estimator(name)(table([[5.0, math.nan], [0.0, 1.0]], valid=valid))
    assert result.advantages[0].tolist() == [0.0, 0.0]
    assert (result.advantages[1] != 0).all()


def test_group_of_two() -> None:
    pair = table([[0.3, 0.8]])
    half = math.sqrt(0.5)
    assert make_advantage_estimator("grpo", eps=0.0)(pair).advantages[0].tolist() == pytest.approx([-half, half])
    assert make_advantage_estimator("grpo", eps=0.0, ddof=0)(pair).advantages[0].tolist() == pytest.approx([-1, 1])
    assert make_advantage_estimator("rloo")(pair).advantages[0].tolist() == pytest.approx([-0.5, 0.5])


def test_shrinkage_with_a_weight_of_ones_own_lies_between_rloo_and_bloo() -> None:
    rewards = table([[0.0, 1.0, 1.0], [0.5, 0.0, 2.0], [0.3, 0.1, 0.0]])
    rloo, bloo = (make_advantage_estimator(name)(rewards).advantages for name in ("rloo", "bloo"))
    for weight in (0.0, 0.4, 1.0):
        result = make_advantage_estimator("shrinkage", weight=weight)(rewards)
        torch.testing.assert_close(result.advantages, (1 - weight) * rloo + weight * bloo, rtol=1e-12, atol=1e-12)
        assert result.metrics["shrinkage/lambda"] == pytest.approx(weight)


def test_shrinkage_refuses_groups_of_one() -> None:
    with pytest.raises(ValueError, match="at least 2 rollouts per prompt; prompt 1 has 1"):
        make_advantage_estimator("shrinkage")(table([[0.0, 1.0], [0.5, 0.0]], valid=torch.tensor([[1, 1], [1, 0]]) > 0))


def test_one_prompt() -> None:
    one = table([[0.0, 1.0, 1.0]])
    result = make_advantage_estimator("shrinkage")(one)
    assert result.group["shrinkage"].tolist() == [0.0]
    assert torch.equal(result.advantages, make_advantage_estimator("rloo")(one).advantages)
    with pytest.raises(ValueError, match="bloo needs at least 2 prompts"):
        make_advantage_estimator("bloo")(one)
    awpo = make_advantage_estimator("awpo")(with_judge([[0.0, 1.0, 2.0]], [[0.5, 0.25, 0.75]]))
    assert awpo.group["w_mix"].tolist() == [0.0]


def test_two_prompts() -> None:
    result = make_advantage_estimator("shrinkage")(table([[0.0, 1.0], [0.5, 0.5]]))
    assert result.group["shrinkage"].tolist() == [0.0, 0.5]  # the other has no variance; the other has


@pytest.mark.parametrize("value", [0.1, 1 / 3, 2.6])
def test_all_others_constant_and_equal_is_rloo(value: float) -> None:
    given = table([[1.0, 0.0, 1.0], [value] * 3, [value] * 3, [value] * 3])
    result = make_advantage_estimator("shrinkage")(given)
    assert result.group["shrinkage"][0] == 0.0
    assert torch.equal(result.advantages[0], make_advantage_estimator("rloo")(given).advantages[0])


def test_shrinkage_keeps_its_digits_beside_an_outlier() -> None:
    """Leave-one-out spread by subtraction would lose all digits here."""
    rewards = [[1e8, 1e8 + 1], [0.0, 1.0], [0.5, 0.6], [0.2, 0.9]]
    result = make_advantage_estimator("shrinkage")(table(rewards))
    rest = torch.tensor(rewards[1:], dtype=torch.float64)
    v, s = (rest.var(1) / 2).mean(), rest.mean(1).var(unbiased=False)
    assert float(result.group["shrinkage"][0]) == pytest.approx(float(0.75 * v / (v + s)), rel=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 13])
def test_leave_one_out_tree_equals_the_loop(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    values = torch.randn(n, generator=generator, dtype=torch.float64)
    extra = torch.rand(n, generator=generator, dtype=torch.float64)
    present = torch.rand(n, generator=generator) > 0.2
    others = leave_one_out(values, extra, present)
    for i in range(n):
        rest = [k for k in range(n) if k != i and present[k]]
        assert others.size[i] == len(rest)
        if rest:
            assert float(others.mean[i]) == pytest.approx(float(values[rest].mean()), rel=1e-12, abs=1e-14)
            spread = (values[rest] - values[rest].mean()).square().sum()
            assert float(others.deviation[i]) == pytest.approx(float(spread), rel=1e-12, abs=1e-14)
            assert float(others.total[i]) == pytest.approx(float(extra[rest].sum()), rel=1e-12)


def test_awpo_without_any_dispersion() -> None:
    result = make_advantage_estimator("awpo")(with_judge([[1.0, 1.0]] * 2, [[0.5, 0.5]] * 2))
    assert result.group["rho"].tolist() == [0.0, 0.0]
    assert result.group["w_mix"].tolist() == [0.0, 0.0]
    assert (result.advantages == 0).all()
    assert result.clip_range == (0.2, 0.2)


def test_awpo_with_a_judge_that_cancels_the_outcome() -> None:
    given = with_judge([[0.0, 1.0], [2.0, 2.0]], [[1.0, 0.0], [0.0, 0.0]])
    result = make_advantage_estimator("awpo", eps=0.0)(given)
    assert result.group["rho"][0] == 0.0
    assert result.advantages[0].tolist() == pytest.approx([-0.5, 0.5])  # d A_out; the mean 0.5 is not above tau_low


def test_awpo_gate_at_one_half_is_shut() -> None:
    """sigma_mix = sigma_out and eps_std = 0 give rho = 1/2 exactly, and the comparison is strict."""
    given = with_judge([[0.1, 0.9, 0.3], [2.0, 2.0, 2.0]], [[0.7, 0.7, 0.7], [0.0, 0.0, 0.0]])
    shut = make_advantage_estimator("awpo", eps_std=0.0, eps_mix=0.5)(given)
    assert shut.group["w_mix"][0] == 0.0
    open_ = make_advantage_estimator("awpo", eps_std=0.0, eps_mix=0.501)(given)
    assert float(open_.group["w_mix"][0]) == pytest.approx(0.5)


def test_awpo_means_that_only_rounding_tells_apart_are_equal() -> None:
    given = with_judge([[0.1, 0.2, 0.7], [0.7, 0.2, 0.1]], [[0.5, 0.9, 0.0], [0.5, 0.0, 0.9]])
    assert make_advantage_estimator("awpo")(given).group["w_mix"].tolist() == [0.0, 0.0]  # both are the peak


def test_awpo_thresholds_are_strict_up_to_rounding() -> None:
    """A mean or a share that equals its threshold in exact arithmetic is not beyond it, wherever its last digit falls."""

    def run(parts: list[float], judge: float = 0.5, **params: float) -> dict[str, Tensor]:
        values = torch.tensor([[[*parts, 0.0], [*parts, judge]], [[9.0] * 3, [9.0] * 3]], dtype=torch.float64)
        names = ("a", "b", "judge")
        return make_advantage_estimator("awpo", **params)(RewardTable(values, names)).group

    assert 0.1 + 0.2 > 0.3
    assert run([0.1, 0.2], tau_low=0.3)["difficulty"][0] == 0.5
    assert run([0.1, 0.2 + 1e-12], tau_low=0.3)["difficulty"][0] == 1.5
    assert 0.3 - 0.1 < 0.2
    assert run([0.3, -0.1], tau_low=0.0, tau_high=0.2)["difficulty"][0] == 0.5
    assert run([0.3, -0.1 - 1e-12], tau_low=0.0, tau_high=0.2)["difficulty"][0] == 1.5
    assert run([0.3, -0.1], r_out_max=0.2, eps_mix=2.0)["w_mix"][0] == 0
    assert run([0.3, -0.1 - 1e-12], r_out_max=0.2, eps_mix=2.0)["w_mix"][0] > 0
    # sigma_mix is 3/2 of sigma_out, rho 3/5: to its last digit in some groups only.
    out = torch.randn(50, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = RewardTable(torch.stack([out, out / 2], 2), ("outcome", "judge"))
    fixed = {"eps_std": 0.0, "r_out_max": 99.0}
    below, at, above = (
        make_advantage_estimator("awpo", eps_mix=eps, **fixed)(given).group for eps in (0.6 - 1e-13, 0.6, 0.6 + 1e-13)
    )
    assert (at["rho"] < 0.6).any()
    assert (at["rho"] >= 0.6).any()
    assert not below["w_mix"].any()
    assert not at["w_mix"].any()
    assert torch.equal(above["w_mix"], above["rho"])


def test_awpo_peak_is_the_same_for_the_same_rewards_in_another_order() -> None:
    """Sums in another order may differ in the last digit; whoever shares the peak is saturated all the same."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(64, generator=generator, dtype=torch.float64) ** 3
    out = torch.stack([row[torch.randperm(64, generator=generator)] for _ in range(50)])
    assert len({math.fsum(each) - float(each.sum()) for each in out}) > 1
    values = torch.stack([out, torch.rand(50, 64, generator=generator, dtype=torch.float64) * 0.1], 2)
    result = make_advantage_estimator("awpo")(RewardTable(values, ("outcome", "judge")))
    assert (result.group["rho"] < 0.7).all()
    assert (result.group["w_mix"] == 0).all()


def test_awpo_running_peak_is_state() -> None:
    low, high = with_judge([[0.0, 1.0]], [[0.5, 0.0]]), with_judge([[1.0, 2.0]], [[0.0, 0.0]])
    first = make_advantage_estimator("awpo")
    first(high)
    second = make_advantage_estimator("awpo")
    second.load_state_dict(first.state_dict())
    assert first.state_dict() == {"r_out_max": 1.5}
    assert second(low).group["w_mix"].tolist() == first(low).group["w_mix"].tolist() != [0.0]
    fixed = make_advantage_estimator("awpo", r_out_max=2.0)
    assert fixed.state_dict() == {}
    with pytest.raises(
        ValueError, match=r"params\.r_out_max is 2\.0, and the state of the run .* has 1\.5; set it back"
    ):
        fixed.load_state_dict({"r_out_max": 1.5})
    with pytest.raises(ValueError, match="no state"):
        make_advantage_estimator("grpo").load_state_dict({"r_out_max": 1.5})


@pytest.mark.parametrize("name", list_advantage_estimators())
def test_prompts_without_any_rollout_are_ignored(name: str) -> None:
    values = torch.tensor([[[0.0, 0.5], [1.0, 0.25]], [[9.0, 9.0], [7.0, 7.0]], [[2.0, 0.0], [0.5, 1.0]]]).double()
    valid = torch.tensor([[True, True], [False, False], [True, True]])
    greedy = torch.tensor([[0.5, 0.5], [9.0, 9.0], [0.0, 0.0]]).double()
    estimator, other = make_advantage_estimator(name), make_advantage_estimator(name)
    whole = estimator(RewardTable(values, ("outcome", "judge"), valid, greedy=greedy)).advantages
    without = other(RewardTable(values[[0, 2]], ("outcome", "judge"), greedy=greedy[[0, 2]])).advantages
    assert whole[1].tolist() == [0.0, 0.0]
    torch.testing.assert_close(whole[[0, 2]], without, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", list_advantage_estimators())
def test_a_step_without_any_rollout_is_refused(name: str) -> None:
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=rf"{name} needs at least \d prompts .*; there is 0"):
        make_advantage_estimator(name)(RewardTable(torch.zeros(2, 3, 2), ("outcome", "judge"), nothing))


def test_missing_inputs_are_named() -> None:
    plain = table([[0.0, 1.0]])
    with pytest.raises(ValueError, match="greedy"):
        make_advantage_estimator("remax")(plain)
    with pytest.raises(ValueError, match="lengths"):
        make_advantage_estimator("reinforce_pp", over="tokens")(plain)
    with pytest.raises(ValueError, match="lengths"):
        make_advantage_estimator("gdpo", over="tokens")(plain)
    with pytest.raises(ValueError, match="judge"):
        make_advantage_estimator("awpo")(plain)
    with pytest.raises(ValueError, match="besides judge"):
        make_advantage_estimator("awpo")(RewardTable(torch.zeros(1, 2, 1), ("judge",)))
    with pytest.raises(ValueError, match="rescale"):
        make_advantage_estimator("grpo")(table([[0.0, 1e200]]))
    with pytest.raises(ValueError, match="rescale"):
        make_advantage_estimator("gdpo")(table([[0.0, 1.0]], weights={"r": 1e200}))


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_weight_that_is_no_number_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="the weight of the reward 'r' must be a finite number"):
        make_advantage_estimator("gdpo")(table([[0.0, 1.0]], weights={"r": weight}))


def test_result_dtype_follows_the_rewards() -> None:
    values = torch.tensor([[[0.0], [1.0]]])
    for dtype, expected in (
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ):
        assert make_advantage_estimator("grpo")(RewardTable(values.to(dtype), ("r",))).advantages.dtype == expected


def test_noise_is_relative_to_the_terms_that_cancel() -> None:
    """0.1 in exact arithmetic, and float32's rounding at 3,000: a sum's own size would take that for signal."""
    values = torch.tensor([[[1000.3, -1000.2], [3000.4, -3000.3]]], dtype=torch.float32)
    rewards = RewardTable(values, ("a", "b"))
    assert values.double().sum(2).unique().numel() == 2
    assert (make_advantage_estimator("dr_grpo")(rewards).advantages == 0).all()


def test_a_table_without_rewards_sums_to_zero() -> None:
    assert Groups(RewardTable(torch.zeros(2, 3, 0), ())).rewards.tolist() == [[0.0] * 3] * 2
