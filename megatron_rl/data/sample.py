"""One prompt, and everything a reward may know about it. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, TypedDict, cast

if TYPE_CHECKING:
    import numpy as np

    from megatron_rl.data.images import PromptImages

Message: TypeAlias = dict[str, object]  # of a chat: `role`, `content`, and what else the model's template reads
Prompt: TypeAlias = str | list[Message]
Demonstration: TypeAlias = str | list[Message]  # a response's text, or the conversation that follows the prompt
EVERY_COLUMN = "*"
"""In the place of a column's name in an agent's rewards: the number is that of every column."""


class Call(TypedDict):
    """A tool call."""

    name: str
    parameters: dict[str, object]


class SampleMapping(TypedDict, total=False):
    """The mapping that a reward function receives; keys without a value are absent. The last four are there in a run only."""

    prompt: Prompt
    answer: object  # gold text, number or list
    tool_calls: list[Call]  # gold calls
    needs_response: bool
    metadata: dict[str, object]
    finish_reason: str  # stop | length
    num_tokens: int  # length of the response
    messages: list[Message]  # the whole conversation, where an agent held one
    agent_rewards: Mapping[str, float]  # what the agent returned, by column; empty: nothing


class TokenMapping(SampleMapping, total=False):
    """The mapping that a reward per token receives."""

    token_ids: np.ndarray  # int64 [tokens], of the prompt and all that follows
    loss_mask: np.ndarray  # bool [tokens]; True where the policy drew the token
    logprobs: np.ndarray  # float32 [response tokens], of the drawn ones, under the engine's sampling distribution


@dataclass
class Sample:
    """One prompt of a task."""

    id: str  # "<task>/<index>", unique within a run; groups are formed by it
    task: str  # the key under `tasks.train` or `tasks.eval`
    prompt: Prompt
    prompt_ids: list[int]  # what the engine is given; never re-tokenised later
    answer: object = None
    tool_calls: list[Call] | None = None  # gold calls
    needs_response: bool | None = None
    metadata: dict[str, object] = field(default_factory=dict)
    demonstration: Demonstration | None = None  # SFT target, where the task has one
    images: PromptImages | None = None  # whose tokens are among `prompt_ids`
    agent: str | None = None  # the task whose `agent` converses about the prompt; None: the response is the rollout
    # Of one rollout, in the copy that is scored.
    messages: list[Message] | None = None
    agent_rewards: Mapping[str, float] | None = None

    def as_mapping(self) -> SampleMapping:
        """The mapping that a reward function receives, without the keys that only a run knows."""
        keys = ("prompt", "answer", "tool_calls", "needs_response", "metadata", "messages", "agent_rewards")
        return cast(SampleMapping, {key: getattr(self, key) for key in keys if getattr(self, key) is not None})
