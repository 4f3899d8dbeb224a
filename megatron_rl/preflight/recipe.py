"""All that can be known of a recipe before its processes start: its keys, its tasks and their first rows, its rewards."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_rl.agents.registry import agent_tasks, check_agents
from megatron_rl.base.messages import errors_named
from megatron_rl.base.shipped import find_recipe, missing
from megatron_rl.config import Config, ConfigError, Machine, check
from megatron_rl.data.sample import Sample
from megatron_rl.models import HFConfig
from megatron_rl.rewards import Reward, check_rewards
from megatron_rl.tasks import check_tasks, first_items, tasks_to_evaluate
from megatron_rl.tasks.preferences import conversations
from megatron_rl.tasks.sources import SOURCES


def check_recipe(
    config: Config,
    command: str,
    machine: Machine,
    model: HFConfig | None = None,
    recipe: str | os.PathLike[str] | None = None,
) -> Config:
    """The recipe with what follows from its keys filled in, see `config.check`.

    Args:
        model: the model's config.json, where its weights need not be here; None: `model.path` is checked.
        recipe: its file. Where a file that it names is missing, the message says whether it is beside the recipe.

    Raises:
        ConfigError: one line per problem.
    """
    try:
        return _checked(config, command, machine, model)
    except ConfigError as error:
        beside = [] if recipe is None else list(_beside(config, find_recipe(Path(recipe)).parent))
        if not beside:
            raise
        raise ConfigError("\n".join([str(error), *beside])) from None


def _checked(config: Config, command: str, machine: Machine, model: HFConfig | None) -> Config:
    config = check(config, command=command, machine=machine, model=model)
    with errors_named("", as_error=ConfigError):
        check_tasks(tasks_to_evaluate(config.tasks) if command == "evaluate" else config.tasks)
        rewards = check_rewards(config.rewards) if command != "reward-model" else {}
        check_agents(config)
        _check_readers(config, rewards)
        _check_sequences(config, rewards)
        _check_first_samples(config, command, rewards)
    return config


def _check_readers(config: Config, rewards: Mapping[str, Reward]) -> None:
    """ValueError where a reward per token stands where a number per rollout is read."""
    evaluation = config.evaluation
    named = {
        f"evaluation.{key}_reward": [getattr(evaluation, f"{key}_reward")] for key in ("format", "bug", "pass_rate")
    }
    named |= {"trainer.eval_reward": [config.trainer.eval_reward], "evaluation.style": [evaluation.style]}
    named |= {"evaluation.pairwise": evaluation.pairwise or []}
    named |= {"algorithm.zero_variance_rewards": config.algorithm.zero_variance_rewards or []}
    for key, names in named.items():
        for name in names:
            if name in rewards and rewards[name].per_token:
                raise ValueError(
                    f"`{key}` names {name!r}, which has a number per token; name one with a number per rollout"
                )
    by_token = [name for name, reward in rewards.items() if reward.per_token]
    if by_token and config.algorithm.credit == "turn":
        raise ValueError(
            f"rewards.{by_token[0]} has a number per token, and with algorithm.credit=turn all tokens of a turn have its "
            "advantage; set algorithm.credit=rollout, or remove the reward"
        )
    for task in config.tasks.eval if rewards else ():
        of_task = [
            name
            for name, reward in config.rewards.items()
            if not reward.when_needed and (reward.tasks is None or task in reward.tasks)
        ]
        if of_task and all(rewards[name].per_token for name in of_task):
            raise ValueError(
                f"no reward says whether a response to `tasks.eval.{task}` is right: {', '.join(of_task)} has a number per "
                "token; add one with a number per rollout, with weight 0 where it is the evaluation's only"
            )


def _check_sequences(config: Config, rewards: Mapping[str, Reward]) -> None:
    """ValueError where a reward per token would get a rollout of several sequences: it reads the tokens of one; and where
    rendered histories have no sequences to begin."""
    for key, task in agent_tasks(config).items():
        if task.agent is not None and task.agent.history == "rendered" and task.agent.sequences == 1:
            raise ValueError(
                f"`{key}.agent.history` is rendered, which begins a sequence where the chat template rewrites an earlier "
                f"turn, and {key}.agent.sequences is 1; set it to as many as there may be, such as {key}.agent.max_turns "
                f"({task.agent.max_turns})"
            )
        for name, reward in rewards.items():
            only, task_name = config.rewards[name].tasks, key.rpartition(".")[2]
            of_task = key.startswith("tasks.train.") and (only is None or task_name in only)
            if task.agent is not None and task.agent.sequences > 1 and reward.per_token and of_task:
                raise ValueError(
                    f"{key}.agent.sequences is {task.agent.sequences}, and rewards.{name} gives a number to each token of "
                    f"one sequence; set it to 1, or list other tasks in rewards.{name}.tasks"
                )


def _check_first_samples(config: Config, command: str, rewards: Mapping[str, Reward]) -> None:
    """ValueError where the first rows of a task's file lack what a reward needs, such as a gold answer it can read."""
    trains = command in ("train", "reward-model")
    tasks = {f"train.{name}": task for name, task in config.tasks.train.items()} if trains else {}
    tasks |= {f"eval.{name}": task for name, task in config.tasks.eval.items()}
    for key, task in tasks.items():
        for where, item in first_items(task):
            rest = item.answer, item.tool_calls, item.needs_response, item.metadata
            sample = Sample(where, key, item.prompt, [], *rest).as_mapping()
            if command == "reward-model":
                with errors_named(f"tasks.{key}: {where}"):
                    conversations(item.prompt, item.metadata)
            for name, reward in rewards.items():
                only = config.rewards[name].tasks
                if not config.rewards[name].when_needed and (only is None or key.partition(".")[2] in only):
                    with errors_named(f"tasks.{key}: {where}: the reward {name!r} cannot score it"):
                        reward.check_sample(sample)


def _beside(config: Config, folder: Path) -> Iterator[str]:
    """A sentence per file or folder that the recipe names by a relative path, and that is beside it, not here."""
    for key, name in _files(config):
        with contextlib.suppress(OSError, ValueError):  # no name of a file, which another message says
            path = Path(name)
            if not (path.is_absolute() or name.startswith("~") or path.exists()) and (folder / path).exists():
                yield (
                    f"`{key}`: {name} does not exist{missing(path)}, where paths in recipes begin; there is one beside the "
                    f"recipe: {key}={os.path.relpath(folder / name)}"
                )


def _files(config: Config) -> Iterator[tuple[str, str]]:
    """Key and path of the files and folders that a recipe names."""
    for key, path in (
        ("model.path", config.model.path),
        ("actor.lora.path", None if config.actor.lora is None else config.actor.lora.path),
    ):
        if path is not None:
            yield key, path
    for split, tasks in (("train", config.tasks.train), ("eval", config.tasks.eval)):
        for name, task in tasks.items():
            if task.path is not None and task.source in SOURCES and "path" in SOURCES[task.source].keys:
                yield f"tasks.{split}.{name}.path", task.path
            if ".py:" in task.source:
                yield f"tasks.{split}.{name}.source", task.source.rpartition(":")[0]
            if task.agent is not None and ".py:" in task.agent.name:
                yield f"tasks.{split}.{name}.agent.name", task.agent.name.rpartition(":")[0]
    for name, reward in config.rewards.items():
        if ".py:" in reward.reward:
            yield f"rewards.{name}.reward", reward.reward.rpartition(":")[0]
    for plugin in config.algorithm.plugins:
        if plugin.endswith(".py"):
            yield "algorithm.plugins", plugin
