"""Failures of the infrastructure at random: what is trained on is what it would be without them."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.algorithms import make_algorithm
from megatron_rl.data.rewards import RewardTable
from megatron_rl.data.rollout import Rollouts
from megatron_rl.trainer.sampler import Sampler
from tests.agents import talking

TEXTS = [f"what is {number}?" for number in range(8)]
GROUP = 8


def shaky(share: float = 0.1, attempts: int = 1) -> Any:
    """In a share of the conversations the first attempts fail: before the first turn, between two, or behind the last."""
    held: dict[int, int] = {}

    async def run(model: Any, task: Any) -> float:
        draw, attempt = random.Random(task["seed"]), held.get(task["seed"], 0)
        held[task["seed"]] = attempt + 1
        breaks_in = draw.randrange(3) if draw.random() < share and attempt < attempts else None

        def between(turn: int) -> None:
            if turn == breaks_in:
                raise ConnectionResetError("the tool's server is gone")

        if breaks_in == 2:
            raise ConnectionRefusedError("nobody is there")
        messages = await talking.turns(model, task, 2, between)
        return float(len(messages[-1]["content"])) + len(messages[1]["content"]) / 100

    return run


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("shaky")
    words = talking.tokenizer(folder)

    def hold(**params: Any) -> tuple[Rollouts, RewardTable]:
        config = talking.recipe(f"{__name__}:shaky", params=params, stop_after=100)
        with talking.hosted(config, words) as conversations:
            rollouts = talking.conversed(conversations, talking.samples(folder, config, words, TEXTS), GROUP)
        rewards = [rollouts.held[row].agent_rewards.get("reward", np.nan) for row in range(len(rollouts))]
        rollouts.columns, rollouts.rewards = ("said",), np.array(rewards)[:, None]
        scorer: Any = SimpleNamespace(
            columns=("said",), configs={"said": SimpleNamespace(weight=1.0)}, token_weights={}
        )
        return rollouts, Sampler.reward_table(SimpleNamespace(scorer=scorer), rollouts)  # type: ignore[arg-type]

    return hold


def advantages(preset: str, table: RewardTable) -> torch.Tensor:
    return make_algorithm({"preset": preset}, max_tokens=60).compute_advantages(table).advantages


@pytest.fixture(scope="module")
def undisturbed(held: Any) -> tuple[Rollouts, RewardTable]:
    rollouts, table = held(share=0.0)
    assert table.values.std(1).min() > 0, "every group has something to learn"
    return rollouts, table


@pytest.mark.parametrize("preset", ["grpo", "rloo", "gdpo", "dr_grpo"])
def test_where_failures_are_redrawn_every_prompt_has_the_advantages_of_a_run_without(
    held: Any, undisturbed: tuple[Rollouts, RewardTable], preset: str
) -> None:
    rollouts, table = held(share=0.1)
    assert not rollouts.lost.any()
    assert talking.bits(rollouts) == talking.bits(undisturbed[0])
    difference = advantages(preset, table).mean(1) - advantages(preset, undisturbed[1]).mean(1)
    assert float(difference.abs().max()) < 1e-6


def test_what_is_lost_for_good_leaves_its_group_as_if_it_had_never_been(
    held: Any, undisturbed: tuple[Rollouts, RewardTable]
) -> None:
    rollouts, table = held(share=0.1, attempts=2)
    lost = rollouts.lost
    assert 2 <= int(lost.sum()) <= 16
    assert torch.equal(table.mask, ~lost)
    assert table.values[..., 0][lost].isnan().all(), "no zero takes its place"
    assert torch.equal(table.values[table.mask], undisturbed[1].values[table.mask])
    for preset in ("grpo", "rloo", "dr_grpo"):
        of_all = advantages(preset, table)
        assert not of_all[lost].any()
        for group in range(len(TEXTS)):
            left = table.mask[group]
            alone = RewardTable(undisturbed[1].values[group : group + 1, left], table.names)
            difference = of_all[group, left] - advantages(preset, alone)[0]
            assert float(difference.abs().max()) < 1e-12, preset
