"""Checks of the stages without rollouts: fine-tuning on demonstrations, reward models on preference pairs."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.schema import Config, SupervisedConfig


def supervised_stage(config: Config, command: str) -> tuple[str, SupervisedConfig]:
    """Key and section of the one that a command other than `evaluate` may run."""
    return ("reward_model", config.reward_model) if command == "reward-model" else ("sft", config.sft)


def check_supervised(config: Config, world: int, command: str) -> Iterator[str]:
    """Yields a sentence per problem. `world`: processes in all."""
    if command == "evaluate":
        return
    parallel, rollout = config.actor.parallel, config.rollout
    ranks = max(1, world // (parallel.tensor * parallel.pipeline * parallel.context))
    name, section = supervised_stage(config, command)
    if section.wanted and section.batch_size < ranks:
        yield f"`{name}.batch_size` ({section.batch_size}) must be at least the {ranks} data-parallel ranks"
    if command != "train" and not section.wanted:
        yield f"`{name}.steps` is 0: there is nothing to do for the command {command}; set it to 1 or more"
    pair = 2 * (rollout.max_prompt_tokens + rollout.max_tokens)
    if command == "reward-model" and config.actor.tokens_per_microbatch < pair:
        yield (
            f"`actor.tokens_per_microbatch` ({config.actor.tokens_per_microbatch}) must hold both sides of the longest pair, "
            f"2 x (rollout.max_prompt_tokens {rollout.max_prompt_tokens} + rollout.max_tokens {rollout.max_tokens}) = {pair}"
        )
    if command == "reward-model" and config.actor.lora is not None:
        yield "`actor.lora` is set, and adapters would leave a reward model's head as it is drawn; set it to null"
    if config.sft.wanted and command in ("train", "sft") and config.tasks.train:
        without = [name for name, task in config.tasks.train.items() if task.demonstrations is None]
        if len(without) == len(config.tasks.train):
            yield (
                f"`sft.steps` is {config.sft.steps}, but no task has demonstrations to learn from; set "
                f"`tasks.train.{without[0]}.demonstrations`, or sft.steps=0"
            )
