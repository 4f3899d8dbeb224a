"""Advantages of turns against loops over Python's floats, for every estimator, on random groups of unequal conversations."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_rl.algorithms import groups_with_variance, list_advantage_estimators, make_algorithm
from megatron_rl.algorithms.credit import turn_tables
from megatron_rl.data.rewards import RewardTable, TurnRewards

Group = list[tuple[dict[str, float], int]]  # of the k-th turns of one prompt: return by column, drawn tokens
WEIGHTS = {"steps": 1.0, "success": 0.5}
REFUSED = {"awpo": "remembers a statistic", "remax": "compares with a greedy rollout"}


def drawn(seed: int, n: int = 4, m: int = 4, gamma: float = 0.9) -> tuple[RewardTable, list[list[list[list[float]]]]]:
    """A step, and its rewards of turns: [prompt][rollout][turn], `steps` of each turn and `success` of the last."""
    rng = random.Random(seed)
    steps = [
        [[rng.choice([-0.5, 0.0, 0.3, 1.0]) for _ in range(rng.randint(1, 4))] for _ in range(m)] for _ in range(n)
    ]
    success = [[float(rng.random() < 0.5) for _ in range(m)] for _ in range(n)]
    longest = max(len(turns) for group in steps for turns in group)

    def padded(values: Callable[[int, int, int], float]) -> torch.Tensor:
        return torch.tensor(
            [
                [[values(i, j, k) if k < len(steps[i][j]) else 0 for k in range(longest)] for j in range(m)]
                for i in range(n)
            ],
            dtype=torch.float64,
        )

    turns = TurnRewards(
        torch.tensor([[len(each) for each in group] for group in steps]),
        padded(lambda i, j, k: 1 + (i + 2 * j + 3 * k) % 7),
        {"steps": padded(lambda i, j, k: steps[i][j][k])},
        gamma,
    )
    values = torch.tensor(
        [[[sum(steps[i][j]), success[i][j]] for j in range(m)] for i in range(n)], dtype=torch.float64
    )
    table = RewardTable(values, ("steps", "success"), weights=WEIGHTS, lengths=turns.lengths.sum(2), turns=turns)
    whole = [
        [[[r, success[i][j] * (k == len(each) - 1)] for k, r in enumerate(each)] for j, each in enumerate(group)]
        for i, group in enumerate(steps)
    ]
    return table, whole


def batch_of(rewards: list[list[list[list[float]]]], lengths: torch.Tensor, k: int, gamma: float) -> list[Group]:
    """The k-th turns of those that have one."""

    def value(turns: list[list[float]], column: int) -> float:
        return math.fsum(gamma ** (at - k) * turns[at][column] for at in range(k, len(turns)))

    return [
        [
            ({"steps": value(turns, 0), "success": value(turns, 1)}, int(lengths[i, j, k]))
            for j, turns in enumerate(group)
            if k < len(turns)
        ]
        for i, group in enumerate(rewards)
    ]


# ------------------------------------------------------------------------------------- estimators, group by group
def total(each: tuple[dict[str, float], int]) -> float:
    return math.fsum(WEIGHTS[name] * value for name, value in each[0].items())


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 and max(values) - min(values) > 1e-12 else 0.0


def z(values: list[float], eps: float) -> list[float]:
    return [(v - mean(values)) / (std(values) + eps) if std(values) else 0.0 for v in values]


def whitened(
    groups: list[list[float]], counts: list[list[int]] | None = None, clear: bool = False
) -> list[list[float]]:
    """Over the batch; each value as often as `counts` says."""
    counts = counts or [[1] * len(group) for group in groups]
    flat = [
        v for group, of in zip(groups, counts, strict=True) for v, c in zip(group, of, strict=True) for _ in range(c)
    ]
    if std(flat) == 0:
        return [[0.0] * len(group) for group in groups]
    divisor = std(flat) + 1e-8 if clear else math.sqrt(statistics.variance(flat) + 1e-8)
    return [[(v - mean(flat)) / divisor for v in group] for group in groups]


def leave_one_out(groups: list[list[float]]) -> list[list[float]]:
    """James-Stein: leave-one-out of the rollouts, shrunk to that of the prompts. Groups of one have 0."""
    live = [group for group in groups if len(group) > 1]
    result = []
    for group in groups:
        if len(group) < 2:
            result.append([0.0] * len(group))
            continue
        others = [each for each in live if each is not group]
        number, mu = len(others), [mean(each) for each in others]
        v = mean([std(each) ** 2 / len(each) for each in others]) if others else 0.0
        s = mean([(x - mean(mu)) ** 2 for x in mu]) if others else 0.0
        weight = v / (v + s) * number / (number + 1) if v > 0 else 0.0
        rest = [mean(group[:j] + group[j + 1 :]) for j in range(len(group))]
        result.append(
            [r - (1 - weight) * b - weight * (mean(mu) if others else 0.0) for r, b in zip(group, rest, strict=True)]
        )
    return result


def bloo(groups: list[list[float]]) -> list[list[float]]:
    means = [mean(group) if group else None for group in groups]
    if sum(each is not None for each in means) < 2:
        return [[0.0] * len(group) for group in groups]
    others = [[x for at, x in enumerate(means) if at != i and x is not None] for i in range(len(groups))]
    return [[r - mean(other) for r in group] for group, other in zip(groups, others, strict=True)]


def gdpo(batch: list[Group], over: str) -> list[list[float]]:
    sums = []
    for group in batch:
        columns = [[WEIGHTS[name] * x for x in z([each[0][name] for each in group], 0.0)] for name in WEIGHTS]
        sums.append([math.fsum(parts) for parts in zip(*columns, strict=True)] if group else [])
    sums = [[0.0 if abs(v) < 1e-12 else v for v in group] for group in sums]
    return whitened(sums, lengths_of(batch) if over == "tokens" else None, clear=True)


def lengths_of(batch: list[Group]) -> list[list[int]]:
    return [[length for _, length in group] for group in batch]


def centred(groups: list[list[float]]) -> list[list[float]]:
    return [[v - mean(group) if std(group) else 0.0 for v in group] for group in groups]


def reference(name: str, batch: list[Group], over: str) -> list[list[float]]:
    totals = [[total(each) for each in group] for group in batch]
    counts = lengths_of(batch) if over == "tokens" else None
    if name == "grpo":
        return [z(group, 1e-6) for group in totals]
    if name == "dr_grpo":
        return centred(totals)
    if name == "rloo":
        return [[v * len(group) / max(1, len(group) - 1) for v in group] for group in centred(totals)]
    if name == "reinforce_pp":
        return whitened(totals, counts)
    if name == "reinforce_pp_baseline":
        return whitened(centred(totals), counts)
    if name == "shrinkage":
        return leave_one_out(totals)
    if name == "bloo":
        return bloo(totals)
    assert name == "gdpo"
    return gdpo(batch, over)


OVER_TOKENS = ("gdpo", "reinforce_pp", "reinforce_pp_baseline")


@pytest.mark.parametrize(
    ("name", "over"),
    [*((name, "sequences") for name in list_advantage_estimators()), *((name, "tokens") for name in OVER_TOKENS)],
)
def test_every_estimator_sees_the_kth_turns_as_a_batch(name: str, over: str) -> None:
    estimator: dict[str, Any] = {"name": name}
    if over == "tokens":
        estimator["params"] = {"over": over}
    if name in REFUSED:
        with pytest.raises(ValueError, match=f"algorithm.credit=turn: the estimator '{name}' {REFUSED[name]}"):
            make_algorithm({"estimator": estimator, "credit": "turn"})
        return
    algorithm = make_algorithm({"estimator": estimator, "credit": "turn"})
    alone = 0
    for seed in range(15):
        gamma = random.Random(seed).choice([1.0, 0.9, 0.25])
        table, rewards = drawn(seed, gamma=gamma)
        assert table.turns is not None
        step = algorithm.compute_advantages(table)
        assert step.turns is not None
        alone_here = 0
        for k in range(step.turns.shape[2]):
            batch = batch_of(rewards, table.turns.lengths, k, gamma)
            alone_here += sum(len(group) == 1 for group in batch)
            expected = reference(name, batch, over)
            for i, group in enumerate(expected):
                has = table.turns.count[i] > k
                assert step.turns[i, has, k].tolist() == pytest.approx(group, rel=1e-9, abs=1e-9), (seed, k, i)
                assert not step.turns[i, ~has, k].any()
        share = alone_here / int(table.turns.count.sum())
        assert step.metrics["groups/turns_alone_share"] == pytest.approx(share)
        alone += alone_here
        assert torch.allclose(step.advantages, step.turns.sum(2) / table.turns.count)
    assert alone > 5


def test_one_turn_each_is_credit_by_rollout() -> None:
    """Where nobody has a second turn, each estimator gives the bits that it gives rollouts."""
    table, _ = drawn(1, gamma=1.0)
    count, lengths = torch.ones(4, 4, dtype=torch.int64), torch.ones(4, 4, 1, dtype=torch.float64)
    turns = TurnRewards(count, lengths, {"steps": table.values[:, :, :1].clone()})
    plain = dataclasses.replace(table, turns=None, lengths=lengths[:, :, 0])
    for name in sorted({*list_advantage_estimators()} - {*REFUSED}):
        by_turn = make_algorithm({"estimator": {"name": name}, "credit": "turn"})
        by_rollout = make_algorithm({"estimator": {"name": name}})
        got = by_turn.compute_advantages(dataclasses.replace(plain, turns=turns))
        expected = by_rollout.compute_advantages(plain)
        assert got.turns is not None
        assert torch.equal(got.turns[:, :, 0], expected.advantages), name
        assert expected.turns is None
        assert {k: v for k, v in got.metrics.items() if k != "groups/turns_alone_share"} == expected.metrics


def test_returns_that_differ_by_rounding_alone_have_no_advantage() -> None:
    """Ten penalties and a prize add up to nothing, but for rounding; GDPO divides by the deviation without an epsilon."""
    count = torch.tensor([[11, 1], [1, 1]])
    own = torch.zeros(2, 2, 11, dtype=torch.float64)
    own[0, 0] = torch.tensor([-0.1] * 10 + [1.0], dtype=torch.float64)
    own[1, 0, 0] = 1.0
    table = RewardTable(
        torch.tensor([[[0.0], [0.0]], [[1.0], [0.0]]], dtype=torch.float64),
        ("r",),
        turns=TurnRewards(count, torch.ones_like(own), {"r": own}),
    )
    step = make_algorithm({"estimator": {"name": "gdpo"}, "credit": "turn"}).compute_advantages(table)
    assert step.turns is not None
    assert float(next(iter(turn_tables(table))).values[0, 0, 0]) != 0.0, "else nothing is tried here"
    assert step.turns[0, :, 0].tolist() == [0.0, 0.0]
    assert step.turns[1, :, 0].abs().min() > 0.5


def test_a_group_of_equal_sums_and_other_turns_has_signal() -> None:
    own = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
    turns = TurnRewards(torch.tensor([[2, 2]]), torch.ones_like(own), {"r": own})
    table = RewardTable(torch.ones(1, 2, 1, dtype=torch.float64), ("r",), turns=turns)
    assert groups_with_variance(table).tolist() == [True]
    assert groups_with_variance(dataclasses.replace(table, turns=None)).tolist() == [False]
    algorithm = make_algorithm({"preset": "dapo", "estimator": {"name": "rloo"}, "credit": "turn"}, max_tokens=9)
    step = algorithm.compute_advantages(dataclasses.replace(table, lengths=own.sum(2)), truncated=torch.zeros(1, 2) > 0)
    assert step.train.all()
    assert step.turns is not None
    assert step.turns.tolist() == [[[0.0, -1.0], [0.0, 1.0]]]


def test_a_column_that_the_algorithm_adds_is_the_last_turn_s() -> None:
    table, _ = drawn(3, gamma=0.5)
    assert table.turns is not None
    algorithm = make_algorithm(
        {"estimator": {"name": "rloo"}, "credit": "turn", "kl": {"reward_coef": 1.0}, "gamma": 0.5}
    )
    kl = torch.arange(16, dtype=torch.float64).view(4, 4)
    with_kl = algorithm.compute_advantages(table, reference_kl=kl)
    without = make_algorithm({"estimator": {"name": "rloo"}, "credit": "turn"}).compute_advantages(table)
    assert with_kl.turns is not None
    assert without.turns is not None
    for k in range(with_kl.turns.shape[2]):
        has = table.turns.count > k
        share = torch.where(has, -kl * 0.5 ** (table.turns.count - 1 - k).double(), 0.0)
        number = has.sum(1, keepdim=True).double()
        centred = torch.where(has, share - share.sum(1, keepdim=True) / number.clamp(min=1), 0.0)
        expected = centred * number / (number - 1).clamp(min=1)
        assert torch.allclose(with_kl.turns[:, :, k] - without.turns[:, :, k], expected, atol=1e-9)
