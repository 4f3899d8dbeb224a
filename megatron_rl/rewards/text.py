"""Rewards on the text and its length alone."""

from __future__ import annotations

import re
from typing import Literal

from megatron_rl.base.messages import errors_named
from megatron_rl.base.typed_params import NonNegative
from megatron_rl.rewards.kinds import UNIT, InlineReward, SampleMapping, stopped
from megatron_rl.rewards.registry import register_reward


@register_reward("format")
def format_reward(pattern: str, require_stop: bool = True) -> InlineReward:
    """1 where the whole completion matches a regular expression, else 0.

    Args:
        pattern: Python regular expression; `.` matches newlines too. The whole completion has to match.
        require_stop: a response cut at the token limit scores 0.
    """
    with errors_named(f"pattern = {pattern!r} is no regular expression", re.error, TypeError):
        compiled = re.compile(pattern, re.DOTALL)

    def score(completion: str, sample: SampleMapping) -> float:
        if require_stop and not stopped(sample):
            return 0.0
        return float(compiled.fullmatch(completion) is not None)

    return InlineReward(score, bounds=UNIT)


@register_reward("length")
def length_reward(limit: NonNegative, unit: Literal["tokens", "characters"] = "tokens") -> InlineReward:
    """1 where the response is at most `limit` long, else 0 (GDPO, section 4.2).

    Args:
        limit: the longest response that is rewarded, inclusive.
        unit: `tokens` (the sample's `num_tokens`, end-of-sequence token included) or `characters` of the completion.
    """

    def score(completion: str, sample: SampleMapping) -> float:
        if unit == "characters":
            return float(len(completion) <= limit)
        if "num_tokens" not in sample:
            raise ValueError("the length reward needs the sample's num_tokens; outside a run use unit='characters'")
        return float(sample["num_tokens"] <= limit)

    return InlineReward(score, bounds=UNIT)
