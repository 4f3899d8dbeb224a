"""Agents by name. An agent converses with the policy about a prompt, and says what the conversation was worth.

A factory makes it from a recipe's parameters: `async def run(model, task)`. It imports nothing heavy and raises ValueError on
a bad parameter, so recipes are checked by making their agents.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from megatron_rl.base.messages import errors_named, unknown_name
from megatron_rl.base.plugins import load_function, source_digest
from megatron_rl.base.typed_params import check_arguments
from megatron_rl.config.schema import AgentConfig, Config, TaskConfig
from megatron_rl.tasks.sources import SPLIT

if TYPE_CHECKING:
    from openai import AsyncOpenAI

T = TypeVar("T")
Verdict: TypeAlias = float | Sequence[float] | Mapping[str, float | Sequence[float]] | None
"""A number, or one per column of the reward `agent`; None, or NaN in a column: none, other rewards decide. A list
in the place of a number has the reward of each turn of the policy, in the order of their requests; it counts as their sum."""
RunAgent: TypeAlias = "Callable[[AsyncOpenAI, AgentTask], Awaitable[Verdict]]"


@dataclass(frozen=True)
class Agent:
    """The function that converses, and what a factory says of it; of a function alone, the defaults hold.

    Args:
        rewards_turns: its verdicts may be lists; False: one number per conversation, which `algorithm.credit=turn` refuses.
    """

    run: RunAgent
    rewards_turns: bool = True


Factory: TypeAlias = "Callable[..., RunAgent | Agent]"

_BUILT_IN: dict[str, str] = {  # name -> the module that registers it
    "gymnasium": "megatron_rl.agents.gymnasium_loop",
    "nemo_gym": "megatron_rl.agents.gyms",
    "tools": "megatron_rl.agents.tool_loop",
    "verifiers": "megatron_rl.agents.gyms",
}
_FACTORIES: dict[str, Factory] = {}


class AgentTask(dict[str, object]):
    """All that an agent may know of a rollout: its sample as rewards get it (`prompt`, as messages; `answer`, `tool_calls`,
    `metadata`), the prompt's `tools` and the rollout's `seed`.

    Args:
        address: the session's base URL over HTTP; the first call opens the server.
        api_key: the session's.
        posted_reward: an agent may await what a program posts to the session's `reward`, which is then the conversation's
            where the agent returns it or None.
        reply: of the environment, by what was asked: `recorded`.
    """

    def __init__(
        self,
        items: Mapping[str, object],
        address: Callable[[], str],
        api_key: str,
        posted_reward: Callable[[], Awaitable[Mapping[str, float | Sequence[float]]]],
        reply: Callable[[object, Callable[[], Awaitable[Any]], bool], Awaitable[Any]],
    ) -> None:
        super().__init__(items)
        self._address, self.api_key = address, api_key
        self.posted_reward, self._reply = posted_reward, reply

    @property
    def base_url(self) -> str:
        """The session's address for programs, on this host's loopback. It ends in `/v1`, as OpenAI's clients take it;
        Anthropic's take it without. Nothing listens before an agent reads it."""
        return self._address()

    async def recorded(self, question: object, call: Callable[[], Awaitable[T]], again: bool = False) -> T:
        """Calls, and keeps the result in the run's journal. A conversation that a kill interrupted gets what it gave then.

        Args:
            question: what is asked for, such as a URL. The same again, in one attempt, gets the next reply.
            call: gives a value of JSON's types.
            again: a recorded call is made nevertheless, for what it changes; what it gives or raises then is not used.

        Raises:
            TypeError: `question` or the value is no JSON.
        """
        made: T = await self._reply(question, call, again)
        return made


def register_agent(name: str) -> Callable[[Factory], Factory]:
    """Decorator: make a factory available under `name`. ValueError if the name is taken."""

    def register(factory: Factory) -> Factory:
        if name in _FACTORIES:
            raise ValueError(f"there is an agent {name!r} already")
        _FACTORIES[name] = factory
        return factory

    return register


def list_agents() -> tuple[str, ...]:
    """Names of the registered agents, sorted."""
    return tuple(sorted({*_BUILT_IN, *_FACTORIES}))


def make_agent(name: str, **params: object) -> Agent:
    """The agent of a registered name, or a user's own: `package.module:factory` or `path/to/file.py:factory`.

    Raises:
        ValueError: an unknown name or parameter (naming the nearest), or a parameter that the agent refuses.
    """
    if ":" in name:
        factory = load_function(name, "agent")
    elif name in list_agents():
        if name not in _FACTORIES:
            importlib.import_module(_BUILT_IN[name])
        factory = _FACTORIES[name]
    else:
        raise ValueError(
            f"{unknown_name('agent', name, list_agents())} (an agent of your own is written file.py:factory)"
        )
    check_arguments(factory, params, of=name)
    with errors_named(name, ValueError, OSError):
        made = factory(**params)
    agent = made if isinstance(made, Agent) else Agent(made)
    run = agent.run
    if not (inspect.iscoroutinefunction(run) or inspect.iscoroutinefunction(getattr(type(run), "__call__", None))):  # noqa: B004
        raise ValueError(f"{name}: the factory returned {run!r:.80}, must be a function `async def run(model, task)`")
    return agent


def agent_tasks(config: Config) -> dict[str, TaskConfig]:
    """Key to task of all tasks whose prompts an agent converses about; without splits, whose train task's agent does."""
    groups = {"train": config.tasks.train, "eval": config.tasks.eval}
    return {
        f"tasks.{group}.{name}": task
        for group, tasks in groups.items()
        for name, task in tasks.items()
        if task.agent is not None
    }


def sources_of(agent: AgentConfig) -> dict[str, str]:
    """Digests of the Python files that an agent's name and parameters name, its own environment's say, by what they write."""
    return {name: digest for name in _texts(asdict(agent)) if (digest := source_digest(name)) is not None}


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def converses(config: Config, name: str) -> bool:
    """Whether an agent converses about the prompts of this task."""
    task = {**config.tasks.train, **config.tasks.eval}[name]
    if task.source == SPLIT and task.of is not None:
        task = config.tasks.train[task.of]
    return task.agent is not None


def check_agents(config: Config) -> None:
    """Makes every agent, and looks for rewards of agents where none converses; no process is started, nothing heavy imported.

    Raises:
        ValueError: naming the key.
    """
    tasks = agent_tasks(config)
    for key, task in tasks.items():
        assert task.agent is not None
        with errors_named(f"{key}.agent"):
            make_agent(task.agent.name, **task.agent.params)
        if not task.chat:
            raise ValueError(f"{key}.agent: a conversation is written by the chat template: set {key}.chat=true")
        limit = config.watchdog.phases.get("generate", config.watchdog.default_minutes) * 60
        if config.watchdog.enabled and task.agent.seconds >= limit:
            raise ValueError(
                f"{key}.agent.seconds ({task.agent.seconds:g}) must be less than the watchdog's {limit:g} seconds for the "
                "phase `generate`; lower it, or raise watchdog.phases.generate (minutes)"
            )
    if config.algorithm.credit == "turn":
        _check_turns(config)
    for name, reward in config.rewards.items():
        if reward.reward == "agent":
            every: Iterable[str] = {**config.tasks.train, **config.tasks.eval}
            for task_name in every if reward.tasks is None else reward.tasks:
                if not converses(config, task_name):
                    raise ValueError(
                        f"rewards.{name}: no agent converses about the prompts of task {task_name!r}; list the tasks that "
                        f"have an agent in rewards.{name}.tasks, or give that task one"
                    )


def _check_turns(config: Config) -> None:
    """ValueError: no turn of this recipe can have a reward, or turns of a group have no order in which they compare."""
    instead = "set algorithm.credit=rollout"
    tasks = {key: task for key, task in agent_tasks(config).items() if key.startswith("tasks.train.")}
    if not tasks:
        raise ValueError(f"algorithm.credit=turn: no training task has an agent, so rollouts have one turn; {instead}")
    if all(reward.reward != "agent" for reward in config.rewards.values()):
        raise ValueError(
            "algorithm.credit=turn: the rewards of turns are what an agent returns, and none of `rewards` reads it; add one "
            f"with reward: agent, or {instead}"
        )
    for name, reward in config.rewards.items():
        if reward.reward == "agent" and reward.condition is not None:
            raise ValueError(
                f"rewards.{name}.condition is for a number per rollout, and algorithm.credit=turn has one per turn; {instead}"
            )
    gives = dict[str, bool]()
    for key, task in tasks.items():
        assert task.agent is not None
        if task.agent.sequences > 1:
            raise ValueError(
                f"{key}.agent.sequences={task.agent.sequences}: algorithm.credit=turn compares the k-th turns of a group, "
                f"and those of several sequences have no common order; {instead}, or sequences to 1"
            )
        agent = make_agent(task.agent.name, **task.agent.params)
        gives[f"{key}.agent ({task.agent.name})"] = agent.rewards_turns
    if not any(gives.values()):
        raise ValueError(f"algorithm.credit=turn: {', '.join(gives)} gives turns no rewards; {instead}")
