"""Rewards and advantages of conversations: lost ones, every estimator, credit by turn."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.algorithms import RewardTable, list_advantage_estimators, make_algorithm
from megatron_rl.algorithms.credit import turn_tables
from megatron_rl.config.schema import RewardConfig
from megatron_rl.data.rollout import Rollouts
from megatron_rl.runtime.distributed import ALONE
from megatron_rl.trainer.minibatch import train_batch
from megatron_rl.trainer.sampler import Sampler
from megatron_rl.trainer.step_metrics import response_metrics, reward_metrics
from megatron_rl.trainer.turn_credit import turn_rewards, turns_of
from tests.agents.talks import TEXTS, Talks


@pytest.fixture
def talks(tmp_path: Path, words: Any) -> Talks:
    return Talks(tmp_path, words)


def test_a_lost_conversation_leaves_its_group_as_if_it_had_never_been(talks: Talks) -> None:
    rollouts = talks("failing", params={"how": "raise", "of": "something"}, count=4)
    rollouts.columns, rollouts.rewards = ("done",), np.random.default_rng(1).normal(size=(12, 1))
    rollouts.rewards[[0, 4, 5, 6, 7]] = np.nan
    rollouts.facts["lost"][0] = True
    scorer: Any = SimpleNamespace(columns=("done",), configs={"done": SimpleNamespace(weight=1.0)}, token_weights={})
    greedy: Any = SimpleNamespace(rewards=np.full((3, 1), np.nan))  # lost, too: they count as their prompts' averages
    table = Sampler.reward_table(SimpleNamespace(scorer=scorer), rollouts, greedy)  # type: ignore[arg-type]
    assert table.greedy is not None
    assert torch.allclose(table.greedy[[0, 2]], torch.stack([table.values[0, 1:].mean(0), table.values[2].mean(0)]))
    algorithm = make_algorithm({"preset": "rloo"})
    estimate = algorithm.compute_advantages(table, truncated=rollouts.truncated)
    assert estimate.train.tolist() == [[False, True, True, True], [False] * 4, [True] * 4]
    without = RewardTable(table.values[:1, 1:], ("done",))
    assert torch.allclose(estimate.advantages[:1, 1:], algorithm.compute_advantages(without).advantages, atol=1e-12)
    assert reward_metrics(table, rollouts)["reward/mean"] == pytest.approx(float(table.values[table.mask].mean()))
    assert (
        response_metrics(rollouts)["response_length/mean"] == rollouts.facts["length"][~rollouts.facts["lost"]].mean()
    )


@pytest.fixture(scope="module")
def with_lost(tmp_path_factory: pytest.TempPathFactory, words: Any) -> tuple[Rollouts, Any]:
    """Three prompts, four conversations each, with a judge's column; all of one prompt are lost. And their rewards."""
    talks = Talks(tmp_path_factory.mktemp("with_lost"), words)
    rollouts = talks("failing", params={"how": "raise", "of": "something"}, count=4)
    rollouts.columns = ("success", "steps", "judge")
    rollouts.rewards = np.random.default_rng(1).integers(0, 2, (12, 3)).astype(float)
    rollouts.rewards[0] = 1 - rollouts.rewards[1]
    rollouts.rewards[8] = 1 - rollouts.rewards[9]
    rollouts.rewards[rollouts.facts["lost"]] = np.nan
    configs = {name: SimpleNamespace(weight=1.0) for name in rollouts.columns}
    scorer: Any = SimpleNamespace(columns=rollouts.columns, configs=configs, token_weights={})
    greedy: Any = SimpleNamespace(rewards=np.array([[0.5, 0.0, 0.0]] * 3), count=1)
    return rollouts, (
        lambda with_greedy: Sampler.reward_table(
            SimpleNamespace(scorer=scorer),
            rollouts,
            greedy if with_greedy else None,  # type: ignore[arg-type]
        )
    )


@pytest.mark.parametrize("name", [*list_advantage_estimators(), "awpo_v1"])
def test_every_estimator_takes_conversations(with_lost: tuple[Rollouts, Any], name: str) -> None:
    """Groups that are whole have advantages; what was lost has none, and changes nobody else's."""
    rollouts, table_of = with_lost
    table = table_of(name == "remax")
    algorithm = make_algorithm({"preset": "awpo_v1"} if name == "awpo_v1" else {"estimator": {"name": name}})
    estimate = algorithm.compute_advantages(table, truncated=rollouts.truncated)
    lost = torch.from_numpy(rollouts.facts["lost"].copy()).view(3, 4)
    assert lost.tolist() == [[False] * 4, [True] * 4, [False] * 4]
    assert not (estimate.train & lost).any()
    assert not estimate.advantages[lost].any()
    assert estimate.advantages.isfinite().all()
    for group in (0, 2):
        assert estimate.advantages[group].unique().numel() > 1, group


def by_turn(rollouts: Rollouts, gamma: float = 0.5) -> tuple[RewardTable, Any]:
    """A step of `turned` with RLOO by turn: its rewards, and what it is trained with."""
    rollouts.turns = turns_of(ALONE, rollouts)
    rollouts.columns, names = ("steps", "short"), ("of turns", "short")
    worth = [[rollouts.held[row].agent_rewards.get(name, np.nan) for name in names] for row in range(len(rollouts))]
    rollouts.rewards = np.array(worth)
    configs = {
        "steps": RewardConfig("agent", 2.0, {"column": "of turns"}),
        "short": RewardConfig("agent", 1.0, {"column": "short"}),
    }
    scorer = SimpleNamespace(columns=rollouts.columns, configs=configs, token_weights={})
    config = SimpleNamespace(algorithm=SimpleNamespace(gamma=gamma))
    table = Sampler.reward_table(SimpleNamespace(scorer=scorer, config=config), rollouts)  # type: ignore[arg-type]
    algorithm = make_algorithm({"preset": "rloo", "credit": "turn", "gamma": gamma})
    estimate = algorithm.compute_advantages(table, truncated=rollouts.truncated)
    return table, train_batch(rollouts, estimate, rollouts.held, algorithm)


def test_each_turn_s_tokens_have_its_advantage(talks: Talks) -> None:
    """By loops over the conversations; of unequal lengths, one of them lost; and the groups in another order."""
    rollouts = talks("turned", count=4, tokens=200)
    rollouts.facts["lost"][2] = True
    _, batch = by_turn(rollouts)
    trained = [row for row in range(12) if not rollouts.facts["lost"][row]]
    longest = 0
    for number, row in enumerate(trained):
        group = [rollouts.held[other] for other in trained if other // 4 == row // 4]
        expected: list[float] = []
        for k, length in enumerate(rollouts.held[row].turn_lengths):
            of = {
                id(each): sum(
                    0.5 ** (at - k)
                    * (2 * each.turn_rewards["of turns"][at] + each.agent_rewards["short"] * (at == last))
                    for last in [len(each.turn_lengths) - 1]
                    for at in range(k, last + 1)
                )
                for each in group
                if len(each.turn_lengths) > k
            }
            own = of.pop(id(rollouts.held[row]))
            expected += [own - np.mean([*of.values()]) if of else 0.0] * length
        longest = max(longest, len(rollouts.held[row].turn_lengths))
        np.testing.assert_allclose(batch.advantages[number], expected, atol=1e-6)
    assert batch.by_token
    assert longest == 4
    assert rollouts.turns is not None
    assert len(pickle.dumps(rollouts.turns)) < 30 * sum(len(each.lengths) for each in rollouts.turns.values())
    again = rollouts.of_prompts([2]) + rollouts.of_prompts([0, 1])
    turned = np.array([*range(8, 12), *range(8)])
    assert again.turns == {new: rollouts.turns[old] for new, old in enumerate(turned) if old in rollouts.turns}


def test_groups_that_do_not_align_end_the_run_by_name(talks: Talks) -> None:
    rollouts = talks("turned", count=2, tokens=200)
    numbers = talks("turned", count=2, tokens=200, params={"numbers": True})
    rollouts.held[1] = numbers.held[1]
    with pytest.raises(
        ValueError, match=r"rollouts of t/0 do not align: rollout 0 has .* column 'of turns', rollout 1 has"
    ):
        by_turn(rollouts)
    elsewhere = {"steps": RewardConfig("agent", 1.0, {"column": "of turns"}, tasks=["another"])}
    with pytest.raises(ValueError, match="no agent returned rewards of turns in the columns of turns"):
        turn_rewards(rollouts, elsewhere, 1.0)
    with pytest.raises(ValueError, match="no agent returned rewards of turns in the columns of turns, short"):
        by_turn(numbers)
    talks("turned", count=1, texts=TEXTS[:1], params={"more": 1})
    [reason] = talks.lost
    assert re.search(r"(\d) rewards of turns in the column 'of turns', and the policy had (\d) turns", reason)


def test_what_the_policy_breaks_off_is_worth_it_in_its_last_turn(talks: Talks) -> None:
    rollouts = talks("turned", count=2, tokens=200, params={"of": "something"}, model_failed=-1.0)
    broken = sorted(row for row, rollout in rollouts.held.items() if rollout.failed_by == "model")
    assert broken == [2, 3]
    rollouts.columns = ("steps",)
    rollouts.turns = turns_of(ALONE, rollouts)
    rollouts.rewards = np.array([[sum(rollouts.held[row].agent_rewards.values())] for row in range(6)])
    configs: Any = {"steps": RewardConfig("agent", 1.0, {"column": "of turns"})}
    turns = turn_rewards(rollouts, configs, 1.0)
    table = RewardTable(torch.from_numpy(rollouts.rewards).view(3, 2, 1), ("steps",), turns=turns)
    returns = torch.stack([each.column("steps") for each in turn_tables(table)], dim=2).view(6, -1)
    for row in broken:
        assert returns[row, : len(rollouts.held[row].turn_lengths)].tolist() == [-1.0] * len(
            rollouts.held[row].turn_lengths
        )
