"""A recipe's `rewards` section, checked by making its rewards. `config.checks` has checked what needs no reward."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_rl.config.schema import RewardConfig
from megatron_rl.names import unknown_name
from megatron_rl.rewards.kinds import Reward
from megatron_rl.rewards.registry import make_reward


def check_rewards(rewards: Mapping[str, RewardConfig]) -> dict[str, Reward]:
    """All rewards of the section, by column name; no process is started and nothing heavy imported.

    Raises:
        ValueError: naming the key and the nearest known name.
    """
    made: dict[str, Reward] = {}
    for name, config in rewards.items():
        try:
            made[name] = make_reward(config.reward, **config.params)
        except ValueError as error:
            raise ValueError(f"rewards.{name}: {error}") from error
    columns = {column: name for name, reward in made.items() for column in columns_of(name, reward)}
    for name, config in rewards.items():
        if config.condition is None:
            continue
        key, other = f"rewards.{name}.condition", config.condition.column
        if other not in columns:
            raise ValueError(f"{key}.column: {unknown_name('reward column', other, columns)}")
        if columns[other] == name:
            raise ValueError(f"{key}.column = {other!r}: a reward cannot depend on itself")
        if rewards[columns[other]].when_needed and not config.when_needed:
            raise ValueError(f"{key}.column = {other!r}: that column is not always computed; drop its when_needed")
    return made


def columns_of(name: str, reward: Reward) -> tuple[str, ...]:
    """Column names of a reward: its own, or one per part that it declares."""
    return (name,) if reward.columns is None else tuple(f"{name}.{part}" for part in reward.columns)
