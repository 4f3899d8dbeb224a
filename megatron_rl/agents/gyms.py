"""The agents `verifiers` and `nemo_gym`: environments of these projects, which run in Python environments of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megatron_rl.agents.guest import interpreter, the_guest
from megatron_rl.agents.registry import Agent, AgentTask, Verdict, register_agent
from megatron_rl.base.typed_params import Params

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_PROGRAMS = Path(__file__).parent / "guests"


@register_agent("verifiers")
def verifiers(environment: Params, path: str | None = None) -> Agent:
    """Rolls out the tasks of a verifiers taskset, which ask the policy by its address.

    The reward, and each reward and metric by its name, are columns.

    Args:
        environment: verifiers' `[env]` block: `{taskset: {id: reverse-text}, agent: {harness: {id: "null"}, …}}`.
        path: a folder in which tasksets lie that are not installed in the environment.
    """
    if not isinstance(environment.get("taskset"), Mapping) or not environment["taskset"].get("id"):
        raise ValueError("environment has no taskset.id")
    if path is not None and not Path(path).is_dir():
        raise ValueError(f"path is no folder: {path}")
    place = None if path is None else str(Path(path).resolve())
    return _agent("verifiers", {"environment": environment, "path": place}, "task", "verifiers_task")


@register_agent("nemo_gym")
def nemo_gym(config_paths: list[str], server: str | None = None, changes: Params | None = None) -> Agent:
    """Runs the servers of a NeMo-Gym configuration, and asks its agent server to run each row of a dataset.

    The reward, and every other number of its reply by its name, are columns.

    Args:
        config_paths: as `ng_run` takes them, without the model server's.
        server: the agent server's name; null: the only one.
        changes: of the configuration.
    """
    if not config_paths:
        raise ValueError("config_paths is empty")
    params = {"config_paths": config_paths, "server": server, "changes": changes or {}}
    return _agent("nemo-gym", params, "row", "nemo_gym_row")


def _agent(environment: str, params: Mapping[str, object], key: str, column: str) -> Agent:
    """An agent that hands what `column` of a prompt's metadata has to the guest, as the request's `key`."""
    program = str(_PROGRAMS / f"run_{environment.replace('-', '_')}.py")
    command = (str(interpreter(environment)), "-u", program)

    async def run(model: AsyncOpenAI, task: AgentTask) -> Verdict:
        task_data = cast(Mapping[str, Any], task["metadata"]).get(column)
        if task_data is None:
            raise ValueError(
                f"the prompt has no {column!r}: write the task's prompts by "
                f"`.venv-agents/{environment}/bin/python {program} export`"
            )
        guest = await the_guest(command, params)
        return cast(Verdict, await guest.ask({key: task_data, "base_url": task.base_url, "api_key": task.api_key}))

    return Agent(run, rewards_turns=False)  # what comes from a guest is one number per conversation
