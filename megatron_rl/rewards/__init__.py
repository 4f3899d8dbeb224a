"""Rewards: text in, named numbers out. Imports no torch and nothing of training."""

import importlib
import pkgutil

from megatron_rl.rewards.kinds import InlineReward, PooledReward, Reward, Score
from megatron_rl.rewards.registry import check_rewards, list_rewards, make_reward, register_reward
from megatron_rl.rewards.remote import RemoteReward
from megatron_rl.rewards.score_checks import RewardError, ScoringStats, condition_reward
from megatron_rl.rewards.scorer import Scorer

for _module in pkgutil.iter_modules(__path__):  # a file here that calls `register_reward` is a built-in reward
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "InlineReward",
    "PooledReward",
    "RemoteReward",
    "Reward",
    "RewardError",
    "Score",
    "Scorer",
    "ScoringStats",
    "check_rewards",
    "condition_reward",
    "list_rewards",
    "make_reward",
    "register_reward",
]
