"""The agent `gymnasium`: each turn of the policy is an action, and what the environment observes is the next message."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

from megatron_rl.agents.failures import InfrastructureFailed, ModelFailed
from megatron_rl.agents.registry import AgentTask, RunAgent, register_agent
from megatron_rl.agents.tool_loop import cut
from megatron_rl.base.typed_params import Params, Positive
from megatron_rl.data.sample import Message
from megatron_rl.rewards.code import Count
from megatron_rl.tasks.reset_step import EnvironmentParams, game_maker

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_LIMITS = ("turn_limit", "context_length_exceeded")


@register_agent("gymnasium")
def gymnasium(
    environment: str,
    environment_params: Params | None = None,
    python: str | None = None,
    step_seconds: Positive = 30.0,
    action: str | None = None,
    longest_observation: Count = 4000,
) -> RunAgent:
    """Plays an environment with Gymnasium's interface from the prompt's `seed`, until it is terminated or truncated.

    Each turn has the reward of its step, and the conversation is worth their sum. The task's limits truncate as the
    environment itself does: what was earned until then counts. What an environment raises, and a call that is late, are
    failures of the infrastructure.

    Args:
        environment, environment_params, python, step_seconds: as of the source `gymnasium`, whose prompts have the first
            observation and the seed that it belongs to.
        action: a regular expression: the action is what its first group (without one, all of it) has matched last in the
            policy's turn, and a turn without a match ends the conversation, with the reward `model_failed`; null: the turn.
        longest_observation: characters of an observation that the model sees; the rest is left out, with a word that it is.
    """
    make = game_maker(EnvironmentParams(environment, environment_params or {}, python, step_seconds))
    try:
        pattern = None if action is None else re.compile(action, re.DOTALL)
    except re.error as error:
        raise ValueError(f"action: {action!r} is no regular expression: {error}") from None

    async def run(model: AsyncOpenAI, task: AgentTask) -> list[float]:
        messages: list[Any] = [*cast(list[Message], task["prompt"])]
        game = make()
        try:
            _check_first(await game.reset(_seed_of(task)), messages[-1])
            rewards = list[float]()
            while True:
                try:
                    answer = await model.chat.completions.create(model="policy", messages=messages)
                except Exception as refusal:  # of openai's classes, which take a second to import
                    if getattr(refusal, "code", None) in _LIMITS:
                        return rewards
                    raise
                messages.append(answer.choices[0].message.to_dict())
                said = await game.step(_action(pattern, answer.choices[0].message.content or ""))
                rewards.append(said.reward)
                if said.ended:
                    return rewards
                messages.append({"role": "user", "content": cut(said.observation, longest_observation)})
        finally:
            await game.close()

    return run


def _seed_of(task: AgentTask) -> int:
    metadata = task.get("metadata")
    seed = metadata.get("seed") if isinstance(metadata, dict) else None
    if not isinstance(seed, int):
        raise InfrastructureFailed(
            f"the prompt has the seed {seed!r}, no whole number: give its row one, or make prompts by the source `gymnasium`"
        )
    return seed


def _check_first(observation: str, prompt: Message) -> None:
    if observation not in str(prompt.get("content")):
        raise InfrastructureFailed(
            f"reset observes {observation!r:.200}, which is not in the prompt: make prompts by the source `gymnasium`, with "
            "the agent's environment, and see that `reset` depends on nothing but the seed"
        )


def _action(pattern: re.Pattern[str] | None, text: str) -> str:
    if pattern is None:
        return text
    found = [*pattern.finditer(text)]
    if not found:
        raise ModelFailed(f"the turn has no action: nothing in it matches {pattern.pattern!r}")
    return str(found[-1][1] or "") if pattern.groups else str(found[-1][0])
