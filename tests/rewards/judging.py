"""A judge of the tests: made quickly, asked all at once, and its counts added up."""

from __future__ import annotations

from concurrent.futures import wait
from typing import Any

from megatron_rl.rewards import make_reward
from megatron_rl.rewards.remote import Counts, RemoteReward

SAMPLE = {
    "prompt": "What is the weather in Oslo?",
    "tool_calls": [{"name": "weather", "parameters": {"city": "Oslo"}}],
    "metadata": {"rationale": "The user wants weather, so I look it up."},
}
FAST = {"backoff_seconds": 0.01, "request_seconds": 5.0, "retries": 3}


def make(url: Any, **params: Any) -> RemoteReward:
    reward = make_reward("judge", urls=url, model="m", **{**FAST, **params})
    assert isinstance(reward, RemoteReward)
    return reward


def scores(reward: RemoteReward, completions: list[str], seconds: float = 60) -> list[float | None]:
    """Starts all, waits, expires what is left."""
    futures = [reward.submit(completion, SAMPLE) for completion in completions]
    _, late = wait(futures, seconds)
    if late:
        reward.expire()
    return [future.result(10) for future in futures]


def adds_up(counts: Counts) -> None:
    traffic = counts.traffic
    ends = traffic.replies + traffic.timeouts + traffic.rate_limited + traffic.errors + traffic.aborted
    assert traffic.requests == ends
    assert len(traffic.latencies) == traffic.replies
