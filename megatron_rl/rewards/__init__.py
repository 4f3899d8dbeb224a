"""Rewards: text in, named numbers out. Importable without torch; nothing here knows about training."""

from megatron_rl.rewards import api_bank, chain_sum, code, judge, maths, puzzle, reward_model, rubric, text, tools  # noqa: F401  (fill the registry)
from megatron_rl.rewards.registry import Reward, Score, list_rewards, make_reward, register_reward
from megatron_rl.rewards.scorer import Report, RewardError, Scorer, condition_reward
from megatron_rl.rewards.scoring import check_rewards, score_rollouts

__all__ = [
    "Report",
    "Reward",
    "RewardError",
    "Score",
    "Scorer",
    "check_rewards",
    "condition_reward",
    "list_rewards",
    "make_reward",
    "register_reward",
    "score_rollouts",
]
