"""Credit by turn: the k-th turns of a step's conversations as a batch of their own, which any estimator of groups takes.

Turn k of a rollout is worth its return, the discounted rewards from it to the last turn, and is compared with the k-th turns
of the group's other rollouts that have one. These are drawn independently of it, and whether a rollout has a k-th turn is
decided before that turn is drawn: a baseline of the others, such as RLOO's, leaves the gradient's mean as it is, whatever
their states. Returns per turn: Zeng et al. 2025, https://arxiv.org/abs/2505.11821; the comparison at equal turns is ours to
state, GiGPO (https://arxiv.org/abs/2505.10978) compares at equal states.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_rl.algorithms.registry import AdvantageEstimator
from megatron_rl.data.rewards import RewardTable
from megatron_rl.methods import Estimate


def turn_tables(table: RewardTable) -> Iterator[RewardTable]:
    """Yields for each k the table of the k-th turns: returns as values, the turns' tokens as lengths; valid are rollouts
    that have a k-th turn."""
    turns = table.turns
    assert turns is not None
    values = torch.where(table.scored_mask, table.values.double(), 0.0)
    numbers = torch.arange(turns.lengths.shape[2])
    is_last = numbers == turns.count[:, :, None] - 1
    rewards = torch.stack(
        [
            # NaN where the turns of a rollout have no rewards of their own
            torch.where(own.isnan(), is_last * values[:, :, [index]], own)
            if (own := turns.rewards.get(name)) is not None
            else is_last * values[:, :, [index]]
            for index, name in enumerate(table.names)
        ],
        dim=3,
    )  # [n, m, T, k]
    returns, sizes, later = [], [], [torch.zeros_like(values)] * 2
    for each in rewards.flip(2).unbind(2):
        later = [each + turns.gamma * later[0], each.abs() + turns.gamma * later[1]]
        returns.append(later[0])
        sizes.append(later[1])
    dtype = table.values.dtype
    for k, (value, size) in enumerate(zip(returns[::-1], sizes[::-1], strict=True)):
        terms = (turns.count - k).clamp(min=1)[:, :, None]  # each adds rounding noise
        yield dataclasses.replace(
            table,
            values=value.to(dtype),
            valid=table.mask & (turns.count > k),
            lengths=turns.lengths[:, :, k],
            sizes=size * terms,
            turns=None,
        )


def estimate_turns(estimator: AdvantageEstimator, table: RewardTable) -> tuple[Estimate, Tensor]:
    """The estimator on the k-th turns of all rollouts, for each k.

    Turns of groups that are too small for the estimator, or of too few prompts, have advantage 0.

    Returns:
        The mean over each rollout's turns; and the advantages, [n, m, T], 0 where there is no such turn. Metrics are means
        over the groups of turns.

    Raises:
        ValueError: the estimator has a clip range for the batch, which is one for all turns.
    """
    needs, advantages = estimator.needs, list[Tensor]()
    totals, groups, alone, number = defaultdict[str, float](float), 0, 0, 0
    for turn in turn_tables(table):
        number += int(turn.mask.sum())
        alone += int((turn.mask.sum(1) == 1).sum())
        turn = dataclasses.replace(turn, valid=turn.mask & (turn.mask.sum(1, keepdim=True) >= needs.group_size))
        present = int(turn.mask.any(1).sum())
        if present < max(1, needs.prompts):
            advantages.append(torch.zeros_like(table.values[:, :, 0]))
            continue
        result = estimator(turn)
        if result.clip_range is not None:
            raise ValueError(
                f"{estimator.name} chose a clip range for a batch, and algorithm.credit=turn has a batch per turn; set it to "
                "rollout"
            )
        advantages.append(result.advantages)
        groups += present
        for name, value in result.metrics.items():
            totals[name] += present * value
    stacked = torch.stack(advantages, dim=2)
    assert table.turns is not None
    metrics = {name: total / groups for name, total in totals.items()}
    metrics["groups/turns_alone_share"] = alone / max(1, number)
    mean = stacked.sum(2) / table.turns.count.clamp(min=1)
    return Estimate(mean, metrics), stacked
