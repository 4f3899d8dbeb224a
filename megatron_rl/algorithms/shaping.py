"""Reward shaping before the estimator, and which groups and rollouts take part."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.algorithms.credit import turn_tables
from megatron_rl.data.rewards import RewardTable
from megatron_rl.methods.groups import Groups


def add_column(table: RewardTable, name: str, values: Tensor, weight: float) -> RewardTable:
    """The table with one more reward column; values [n, m]. A greedy rollout gets 0 in it.

    Raises:
        ValueError: if the name is taken or the shape does not fit.
    """
    if name in table.names:
        raise ValueError(f"the reward column {name!r} is made by the algorithm; rename yours under `rewards`")
    if values.shape != table.mask.shape:
        raise ValueError(f"column {name!r} must be {tuple(table.mask.shape)}, not {tuple(values.shape)}")
    column = values.to(table.values)[:, :, None]
    greedy = None if table.greedy is None else torch.nn.functional.pad(table.greedy, (0, 1))
    scored = None if table.scored is None else torch.nn.functional.pad(table.scored, (0, 1), value=True)
    return dataclasses.replace(
        table,
        values=torch.cat([table.values, column], dim=2),
        names=(*table.names, name),
        weights={**(table.weights or {}), name: weight},
        greedy=greedy,
        scored=scored,
    )


def overlong_penalty(lengths: Tensor, max_length: int, share: float) -> Tensor:
    """Soft overlong punishment (DAPO Eq. 13): 0 up to (1 - share) max_length, falling linearly to -1 at max_length.

    Lengths are in tokens, any shape; the result is float64 of the same shape. `share` is in (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"algorithm.overlong.share must be in (0, 1], not {share!r}")
    if max_length < 1:
        raise ValueError(f"algorithm.overlong: max_length must be at least 1 token, not {max_length!r}")
    buffer = share * max_length
    return -((lengths.double() - (max_length - buffer)) / buffer).clamp(0.0, 1.0)


def groups_with_variance(table: RewardTable, columns: Sequence[str] | None = None) -> Tensor:
    """Prompts with signal (not zero-variance): some reward of non-zero weight differs between two rollouts, or tokens have
    rewards; where turns have advantages of their own, some return of the k-th turns differs. bool [n].

    Args:
        table: raw task rewards, before any shaping.
        columns: only these decide. None: all.

    Raises:
        ValueError: on a name the table does not have.
    """
    names = table.names if columns is None else tuple(columns)
    for name in names:
        table.column(name)
    if table.turns is not None:
        with_signal = [groups_with_variance(turn, columns) for turn in turn_tables(table)]
        return torch.stack([table.mask.any(1) & False, *with_signal]).any(0)
    if table.has_token_rewards and columns is None:
        return table.mask.any(1)
    groups = Groups(table)
    decide = torch.tensor([name in names and table.weight(name) != 0 for name in table.names])
    return ((groups.columns.span[:, 0] > 0) & decide.to(groups.valid.device)).any(1)


def complete_groups(valid: Tensor, group_size: int) -> Tensor:
    """`valid` without the groups that have fewer than `group_size` rollouts; bool [n, m]."""
    return valid & (valid.sum(1, keepdim=True) >= group_size)
