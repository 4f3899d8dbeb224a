"""The parts of a step that need neither engine nor model."""

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithms import (
    Groups,
    RolloutTokens,
    advantage_estimator,
    list_advantage_estimators,
    make_advantage_estimator,
    make_algorithm,
)
from megatron_rl.algorithms.metrics import Metrics
from megatron_rl.config.schema import RewardConfig, SupervisedConfig
from megatron_rl.data.rewards import RewardTable
from megatron_rl.data.rollout import FACTS, Rollout, Rollouts
from megatron_rl.data.sample import Sample
from megatron_rl.evaluation.statistics import pass_at_k
from megatron_rl.methods import catalogue
from megatron_rl.trainer.learner import _token_metrics
from megatron_rl.trainer.minibatch import PolicyTokens, minibatches, train_batch
from megatron_rl.trainer.state import State
from megatron_rl.trainer.step_metrics import reward_metrics, token_reward_metrics
from megatron_rl.trainer.supervised import train_stage

PASS_AT_K = json.loads((Path(__file__).parent / "pass_at_k.json").read_text())


@pytest.mark.parametrize("case", PASS_AT_K, ids=lambda case: case["id"])
def test_pass_at_k_agrees_with_the_references(case):
    if "raises" in case:
        with pytest.raises(ValueError, match="sample"):
            pass_at_k(**case["kwargs"])
    else:
        assert pass_at_k(**case["kwargs"]) == pytest.approx(case["expected"], rel=1e-9, abs=1e-10)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=20), st.integers(1, 8))
def test_minibatches_hold_every_row_once_and_no_group_is_cut(sizes, count):
    group = np.repeat(np.arange(len(sizes)) * 3, sizes)
    parts = minibatches(group, count)
    assert sorted(row for part in parts for row in part) == list(range(len(group)))
    assert len(parts) == min(count, len(sizes))
    owners = [set(group[part].tolist()) for part in parts]
    assert sum(len(owner) for owner in owners) == len(sizes)
    assert max(map(len, owners)) - min(map(len, owners)) <= 1


def test_a_step_that_trains_on_nothing_has_no_minibatches():
    assert minibatches(np.array([], dtype=np.int64), 4) == []


def test_only_rollouts_that_train_reach_the_batch():
    values = torch.tensor([[[1.0], [0.0]], [[1.0], [1.0]], [[0.0], [1.0]]])
    algorithm = make_algorithm({"preset": "grpo", "drop_zero_variance_groups": True})
    estimate = algorithm.compute_advantages(RewardTable(values, ("r",)))
    samples = [Sample(f"t/{i}", "t", "", [1]) for i in range(3)]
    held = {
        i * 2 + j: Rollout.single_turn(samples[i], j, [i, j], "stop", [0.0, 0.0]) for i in range(3) for j in range(2)
    }
    facts = np.zeros(6, dtype=FACTS)
    facts["num_tokens"] = 3
    own = {row: held[row] for row in (0, 4, 5)}
    batch = train_batch(Rollouts(samples, 2, facts, held), estimate, own, algorithm)
    assert batch.group.tolist() == [0, 0, 2, 2]
    assert batch.sequences.lengths == [3, 3, 3, 3], "of all"
    tokens = {row: ids.tolist() for row, ids in batch.sequences.tokens.items()}
    assert tokens == {0: [1, 0, 0], 2: [1, 2, 0], 3: [1, 2, 1]}, "only what this rank has received"
    assert list(batch.rollout_logprobs) == [0, 2, 3]
    advantages = {row: values.tolist() for row, values in batch.advantages.items()}
    assert advantages == {
        row: pytest.approx([sign * 2**-0.5] * 2, rel=1e-5) for row, sign in ((0, 1), (2, -1), (3, 1))
    }, "each rollout's on all of its tokens"


def test_a_token_part_sees_each_rollout_that_this_rank_has(monkeypatch):
    monkeypatch.setattr(catalogue, "CATALOGUE", dict(catalogue.CATALOGUE))

    def first_token_only(tokens: RolloutTokens, *, scale: float = 1.0):
        advantages = tokens.rewards
        advantages[0] = scale * tokens.advantage
        return advantages

    @advantage_estimator("raw", tokens=first_token_only)
    def raw(groups: Groups):
        return groups.rewards

    algorithm = make_algorithm({"estimator": {"name": "raw", "params": {"scale": 2.0}}})
    samples, facts = [Sample("t/0", "t", "", [1])], np.zeros(2, dtype=FACTS)
    rollout = Rollout.single_turn(samples[0], 1, [5, 6, 7], "stop", [0.0] * 3)
    estimate = algorithm.compute_advantages(RewardTable(torch.tensor([[[1.0], [4.0]]]), ("r",)))
    batch = train_batch(Rollouts(samples, 2, facts, {}), estimate, {1: rollout}, algorithm)
    assert batch.by_token
    assert {row: values.tolist() for row, values in batch.advantages.items()} == {1: [8.0, 0.0, 0.0]}


def rewarded_by_token() -> Rollouts:
    """Three prompts of two rollouts each: two teachers of a task each, and a number per rollout; one answer is missing."""
    rng = np.random.default_rng(0)
    samples = [Sample(f"{task}/{i}", task, "", [1]) for i, task in enumerate(("sums", "sums", "words"))]
    facts, held = np.zeros(6, dtype=FACTS), dict[int, Rollout]()
    for row in range(6):
        size = int(rng.integers(1, 9))
        held[row] = Rollout.single_turn(samples[row // 2], row % 2, range(size), "stop", rng.normal(size=size))
        own = row // 2 // 2
        rewards = np.zeros((size, 2), dtype=np.float32)
        rewards[:, own] = np.nan if row == 3 else rng.normal(size=size)
        held[row].token_rewards = rewards
        facts["length"][row], facts["num_tokens"][row] = size, size + 1
    rollouts = Rollouts(samples, 2, facts, held, columns=("right", "adder", "poet"))
    means = [held[row].token_rewards.mean(0) for row in range(6)]
    rollouts.rewards = np.column_stack([np.arange(6.0), np.array(means, dtype=np.float64)])
    rollouts.token_weights = {"adder": 1.0, "poet": 2.0}
    return rollouts


def test_rewards_per_token_are_added_to_the_advantage_of_any_method():
    rollouts, algorithm = rewarded_by_token(), make_algorithm("grpo")
    table = RewardTable(torch.arange(6.0).view(3, 2, 1), ("right",), has_token_rewards=True)
    estimate = algorithm.compute_advantages(table)
    batch = train_batch(rollouts, estimate, rollouts.held, algorithm)
    assert batch.by_token
    for row, advantages in batch.advantages.items():
        tokens = rollouts.held[row].token_rewards
        added = 0.0 if row == 3 else tokens[:, 0] + 2 * tokens[:, 1]
        np.testing.assert_allclose(advantages, float(estimate.advantages.flatten()[row]) + added, rtol=1e-6)


def test_metrics_of_rewards_per_token_are_means_over_the_tokens_that_were_scored():
    rollouts = rewarded_by_token()
    teacher = RewardConfig(reward="teacher")
    rewards = {"adder": replace(teacher, tasks=["sums"]), "poet": replace(teacher, tasks=["words"])}
    metrics = token_reward_metrics(rollouts, rewards)
    tokens = {row: rollout.token_rewards[:, row // 4] for row, rollout in rollouts.held.items() if row != 3}
    both = np.concatenate([*tokens.values()])
    assert metrics["reward/adder"] == pytest.approx(np.concatenate([tokens[row] for row in (0, 1, 2)]).mean(), rel=1e-6)
    assert metrics["reward/poet"] == pytest.approx(np.concatenate([tokens[row] for row in (4, 5)]).mean(), rel=1e-6)
    assert metrics["distillation/reverse_kl"] == pytest.approx(-both.mean(), rel=1e-6)
    table = RewardTable(torch.arange(6.0).view(3, 2, 1), ("right",), weights={"right": 0.5})
    sums = [0.5 * row + (0 if row == 3 else (1 + (row > 3)) * tokens[row].mean()) for row in range(6)]
    assert reward_metrics(table, rollouts)["reward/mean"] == pytest.approx(np.mean(sums), rel=1e-6)


def test_with_rewards_per_token_alone_every_group_trains_and_the_estimators_say_zero():
    table = RewardTable(torch.zeros(3, 4, 0), (), lengths=torch.ones(3, 4), has_token_rewards=True)
    for name in list_advantage_estimators():
        algorithm = make_algorithm({"estimator": {"name": name}, "drop_zero_variance_groups": True})
        if algorithm.estimator.needs.columns or algorithm.estimator.needs.greedy:
            continue
        estimate = algorithm.compute_advantages(table)
        assert estimate.train.all(), name
        assert not estimate.advantages.any(), name


@pytest.mark.parametrize(
    ("result", "problem"),
    [(torch.zeros(2), r"returned shape \(2,\) for 3 tokens"), (torch.tensor([0.0, 1.0, math.nan]), "NaN or infinite")],
)
def test_what_a_token_part_may_not_return(result, problem, monkeypatch):
    monkeypatch.setattr(catalogue, "CATALOGUE", dict(catalogue.CATALOGUE))
    advantage_estimator("broken", tokens=lambda tokens: result)(lambda groups: groups.rewards)
    with pytest.raises(ValueError, match=problem):
        make_advantage_estimator("broken").token_advantages(RolloutTokens(1.0, torch.zeros(3, 0), torch.zeros(0)))


def test_a_parameter_of_both_parts_has_one_default():
    def tokens(rollout: RolloutTokens, *, scale: float = 1.0): ...

    def whole(groups: Groups, *, scale: float = 2.0): ...

    with pytest.raises(ValueError, match="'scale' has another default in the token part"):
        advantage_estimator("two", tokens=tokens)(whole)


@pytest.mark.parametrize(("warming_up", "logged"), [(True, [3, 6, 7]), (False, [3, 4, 6, 7])])
def test_ranks_add_up_metrics_at_the_steps_that_are_logged_and_at_no_others(warming_up, logged):
    """Each time all wait for each other."""

    class Timer:
        def __call__(self, phase: str):
            return nullcontext()

        def start(self, step: int) -> None: ...

        def take(self) -> dict[str, float]:
            return {}

    given, rows = [], []
    report = SimpleNamespace(
        begin=lambda *_: None, log_stage=lambda name, section, step, metrics: rows.append((step, "loss" in metrics))
    )
    run = SimpleNamespace(
        state=State(warming_up=warming_up),
        sampler=SimpleNamespace(prompts=SimpleNamespace(weights=None)),
        config=SimpleNamespace(seed=0),
        stop=SimpleNamespace(check=lambda grid: None),
        grid=None,
        timer=Timer(),
        report=report,
        checkpoints=SimpleNamespace(capture=lambda *_: None, metrics=dict),
    )

    def learn(indices, is_logged):
        given.append(is_logged)
        return {"loss": 1.0} if is_logged else {}

    section = SupervisedConfig(steps=7, log_every=3, eval_every=4, batch_size=2)
    train_stage(run, "SFT", section, ["sums"] * 4, learn, lambda step: {})
    assert [step for step, is_logged in enumerate(given, 1) if is_logged] == logged
    assert rows == [(step, True) for step in logged]


def test_metrics_of_a_token_part_are_over_the_tokens_of_all_micro_batches():
    parts = [torch.tensor([0.5, -2.0, 1.0]), torch.tensor([0.25])]
    metrics = sum((_token_metrics(PolicyTokens(torch.zeros(len(a)), a, None, a)) for a in parts), Metrics()).values()
    assert metrics["token_advantage/mean"] == pytest.approx((0.5 - 2.0 + 1.0 + 0.25) / 4)
    assert metrics["token_advantage/abs_mean"] == pytest.approx((0.5 + 2.0 + 1.0 + 0.25) / 4)
    assert metrics["token_advantage/max"] == 2.0
