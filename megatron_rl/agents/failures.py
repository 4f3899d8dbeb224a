"""Why a conversation ended without the agent's reward, by who failed."""

from __future__ import annotations

from typing import Literal, TypeAlias

FailedBy: TypeAlias = Literal["model", "infrastructure"]


class ModelFailed(Exception):
    """The policy broke off: it wrote a call that cannot be read, or reached a limit. The rollout is trained on, and the
    reward `agent` gives it the task's `agent.model_failed`. An agent may raise it too."""


class InfrastructureFailed(Exception):
    """Something else than the policy failed: a tool's server, the agent itself. The conversation is begun again once, with
    the same seeds; where that fails too, the rollout has no rewards and leaves its group. An agent may raise it, and
    every other error of an agent counts as one, unless a limit of the policy came before it."""


class AgentsFailed(RuntimeError):
    """The run cannot go on: so many conversations in a row were lost (`agent.stop_after`), or an agent blocks all others."""
