"""The learning rate as a pure function of the optimizer step, so that resuming needs no scheduler state."""

from __future__ import annotations

import math

from megatron_rl.config.actor import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of `total_steps`: linear warm-up, then the schedule to `min_lr`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    span = max(1, total_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / span)
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "linear":
        return config.lr + (config.min_lr - config.lr) * done
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * done))  # cosine
