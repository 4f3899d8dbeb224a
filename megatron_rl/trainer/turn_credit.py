"""Turns of a step's conversations on every rank, and their rewards as an estimator takes them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import torch

from megatron_rl.config.schema import RewardConfig
from megatron_rl.data.rewards import TurnRewards
from megatron_rl.data.rollout import Rollouts, Turns
from megatron_rl.runtime.distributed import ProcessGrid

_REMEDY = "return a list with one number per turn from every conversation, or set algorithm.credit to rollout"


def turns_of(grid: ProcessGrid, rollouts: Rollouts) -> dict[int, Turns]:
    """Gathers on every rank, by row, a few numbers per turn. Each rank tells of the rollouts that it hands out."""
    here = {
        row: Turns(one.turn_lengths, None if one.failed_by == "model" else one.turn_rewards)
        for row, one in rollouts.held.items()
        if rollouts.facts["source"][row] == grid.rank
        and not rollouts.facts["lost"][row]
        and rollouts.sample(row).agent is not None
    }
    return {row: turns for part in grid.all_gather(here) for row, turns in part.items()}


def turn_rewards(rollouts: Rollouts, configs: Mapping[str, RewardConfig], gamma: float) -> TurnRewards:
    """The turns' rewards by column of the reward table. A response without an agent is one turn.

    Raises:
        ValueError: groups do not align: no conversation has rewards of its turns, or some of a group have and others not.
    """
    turns = rollouts.turns
    assert turns is not None
    n, m = len(rollouts.samples), rollouts.count
    lengths = [[int(length)] for length in rollouts.facts["length"]]
    for row, each in turns.items():
        lengths[row] = [*each.lengths]
    count = np.where(rollouts.facts["lost"], 0, [len(each) for each in lengths])
    longest = max(1, int(count.max(initial=0)))
    rewards, columns = {}, list[str]()
    for name, config in configs.items():
        if config.reward != "agent":
            continue
        columns.append(str(config.params.get("column", "reward")))
        of_turns = {
            row: each.rewards.get(columns[-1])
            for row, each in sorted(turns.items())
            if each.rewards is not None and (config.tasks is None or rollouts.sample(row).task in config.tasks)
        }
        _check_aligned(rollouts, of_turns, columns[-1])
        table = np.full((n * m, longest), np.nan)
        for row, values in of_turns.items():
            if values is not None:
                table[row] = 0.0
                table[row, : count[row]] = values
        if not np.isnan(table).all():
            rewards[name] = torch.from_numpy(table).view(n, m, longest)
    if not rewards and any(each.rewards is not None for each in turns.values()):
        raise ValueError(
            f"algorithm.credit is turn, and no agent returned rewards of turns in the columns {', '.join(columns)}: {_REMEDY}"
        )
    padded = np.array([[*each[:longest], *[0] * (longest - len(each))] for each in lengths], dtype=np.float64)
    return TurnRewards(torch.from_numpy(count).view(n, m), torch.from_numpy(padded).view(n, m, longest), rewards, gamma)


def _check_aligned(rollouts: Rollouts, of_turns: Mapping[int, tuple[float, ...] | None], column: str) -> None:
    for _, group in itertools.groupby(of_turns, lambda row: row // rollouts.count):
        rows = [*group]
        has = next((row for row in rows if of_turns[row] is not None), None)
        lacks = next((row for row in rows if of_turns[row] is None), None)
        if has is not None and lacks is not None:
            raise ValueError(
                f"algorithm.credit is turn, and the rollouts of {rollouts.sample(has).id} do not align: rollout "
                f"{has % rollouts.count} has rewards of its turns in the column {column!r}, rollout {lacks % rollouts.count} "
                f"has not; {_REMEDY}"
            )
