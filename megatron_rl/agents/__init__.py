"""Conversations with the engine that is trained: agents, their sessions, and the tokens that these record."""

from megatron_rl.agents.failures import AgentsFailed, InfrastructureFailed, ModelFailed
from megatron_rl.agents.registry import Agent, AgentTask, check_agents, list_agents, make_agent, register_agent

__all__ = [
    "Agent",
    "AgentTask",
    "AgentsFailed",
    "InfrastructureFailed",
    "ModelFailed",
    "check_agents",
    "list_agents",
    "make_agent",
    "register_agent",
]
