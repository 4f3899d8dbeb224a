"""The reward that an agent returned."""

from __future__ import annotations

import math

from megatron_rl.data.sample import EVERY_COLUMN, SampleMapping
from megatron_rl.rewards.kinds import InlineReward
from megatron_rl.rewards.registry import register_reward


@register_reward("agent")
def agent(column: str = "reward") -> InlineReward:
    """The number that the agent returned which conversed about the prompt; without a value where it returned none.

    Where the policy broke the conversation off, it is the task's `agent.model_failed`.

    Args:
        column: of the mapping that the agent returned; a number that stands alone is `reward`.
    """

    def score(completion: str, sample: SampleMapping) -> float | None:
        if "agent_rewards" not in sample:
            raise ValueError("no agent has conversed about it: set the task's `agent`")
        rewards = sample["agent_rewards"]
        if not rewards:
            return None
        value = rewards.get(column, rewards.get(EVERY_COLUMN))
        if value is None:
            raise ValueError(f"the agent returned the columns {', '.join(sorted(rewards))}, and not {column!r}")
        return None if math.isnan(value) else value

    return InlineReward(score, may_abstain=True)
