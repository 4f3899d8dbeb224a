"""All that can be known of a recipe before its processes start: its keys, its tasks and their first rows, its rewards."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_rl.config import Config, ConfigError, Machine, check
from megatron_rl.models import HFConfig
from megatron_rl.rewards import Reward, check_rewards
from megatron_rl.sample import Sample
from megatron_rl.tasks import check_tasks, first_items, tasks_to_evaluate
from megatron_rl.tasks.preferences import conversations


def check_recipe(config: Config, command: str, machine: Machine, model: HFConfig | None = None) -> Config:
    """The recipe with what follows from its keys filled in, see `config.check`.
    `model`: the model's config.json, where its weights need not be here; None: `model.path` is checked.

    Raises:
        ConfigError: one line per problem.
    """
    config = check(config, command=command, machine=machine, model=model)
    try:
        check_tasks(tasks_to_evaluate(config.tasks) if command == "evaluate" else config.tasks)
        _check_first_samples(config, command, check_rewards(config.rewards) if command != "reward-model" else {})
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return config


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
                try:
                    conversations(item.prompt, item.metadata)
                except ValueError as error:
                    raise ValueError(f"tasks.{key}: {where}: {error}") from error
            for name, reward in rewards.items():
                only = config.rewards[name].tasks
                if not config.rewards[name].when_needed and (only is None or key.partition(".")[2] in only):
                    try:
                        reward.check_sample(sample)
                    except ValueError as error:
                        raise ValueError(
                            f"tasks.{key}: {where}: the reward {name!r} cannot score it: {error}"
                        ) from error
