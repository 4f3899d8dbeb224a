"""Checks of a recipe's values: each key's choices and range, and a few bounds over several keys."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.keys import problems
from megatron_rl.config.schema import PHASES, Config, OptimizerConfig
from megatron_rl.names import did_you_mean

_MOST_ROLLOUTS = 1e8  # of a step: all of them are in the memory of every rank


def check_values(config: Config) -> Iterator[str]:
    """Yields a sentence per value that is not among its key's choices or out of its range."""
    yield from problems(config)
    rollouts = config.trainer.prompts_per_step * config.rollout.group_size
    if rollouts > _MOST_ROLLOUTS:
        yield (
            f"a step has {rollouts:,} rollouts (`trainer.prompts_per_step` {config.trainer.prompts_per_step:,} x "
            f"`rollout.group_size` {config.rollout.group_size:,}); at most {_MOST_ROLLOUTS:,.0f} are possible: lower one"
        )
    for key, section in (("actor.optimizer", config.actor.optimizer), ("sft.optimizer", config.sft.optimizer)):
        yield from _check_optimizer(key, section)
    for phase in config.watchdog.phases:
        if phase not in PHASES:
            yield (
                f"`watchdog.phases` must be one of {', '.join(PHASES)}; it is {phase!r}{did_you_mean(phase, PHASES)}"
            )
    start = config.watchdog.phases.get("start", config.watchdog.default_minutes)
    if config.watchdog.enabled and (config.launch.endpoint_minutes or 0) >= start:
        yield (
            f"`launch.endpoint_minutes` ({config.launch.endpoint_minutes:g}) must be less than the deadline of the start, in "
            f"which the servers are waited for; raise `watchdog.phases.start` ({start:g})"
        )


def _check_optimizer(key: str, optimizer: OptimizerConfig) -> Iterator[str]:
    if optimizer.min_lr > optimizer.lr:
        yield f"`{key}.min_lr` ({optimizer.min_lr}) must not exceed `{key}.lr` ({optimizer.lr})"
    if len(optimizer.betas) != 2:
        yield f"`{key}.betas` must be two numbers in [0, 1); it is {optimizer.betas}"
