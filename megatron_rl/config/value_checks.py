"""What must hold for single values of a recipe: enumerations and ranges."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from megatron_rl.config.schema import PHASES, Config, OptimizerConfig
from megatron_rl.config.shape import closest

_CHOICES: dict[str, tuple[str, ...]] = {
    "launch.preflight": ("off", "quick", "full"),
    "model.dtype": ("float32", "bfloat16"),
    "checkpoint.on_failure": ("continue", "stop"),
    "rollout.too_long": ("error", "drop"),
    "actor.recompute": ("none", "selective", "full"),
    "actor.optimizer.schedule": ("constant", "linear", "cosine"),
    "sft.optimizer.schedule": ("constant", "linear", "cosine"),
}
_FP8_CHOICES = {"recipe": ("delayed", "tensorwise", "blockwise", "mxfp8"), "format": ("e4m3", "hybrid")}

_AT_LEAST: dict[str, float] = {
    "trainer.steps": 1,
    "trainer.prompts_per_step": 1,
    "trainer.minibatches": 1,
    "trainer.epochs": 1,
    "trainer.eval_every": 0,
    "trainer.eval_rollouts": 1,
    "trainer.eval_temperature": 0,
    "trainer.eval_max_prompts": 1,
    "evaluation.length_limit": 1,
    "evaluation.endpoint.max_in_flight": 1,
    "evaluation.endpoint.retries": 0,
    "evaluation.endpoint.max_failed_share": 0,
    "rollout.tensor_parallel": 1,
    "rollout.group_size": 1,
    "rollout.max_prompt_tokens": 1,
    "rollout.max_tokens": 1,
    "rollout.max_concurrent": 1,
    "rollout.sync_check_rollouts": 1,
    "actor.parallel.tensor": 1,
    "actor.parallel.pipeline": 1,
    "actor.parallel.virtual_pipeline": 1,
    "actor.parallel.context": 1,
    "actor.parallel.expert": 1,
    "actor.parallel.expert_tensor": 1,
    "actor.tokens_per_microbatch": 1,
    "actor.logprob_chunk_tokens": 1,
    "algorithm.max_length": 1,
    "algorithm.overlong.max_length": 1,
    "sft.steps": 0,
    "sft.batch_size": 1,
    "sft.log_every": 1,
    "checkpoint.every": 0,
    "checkpoint.sft_every": 0,
    "checkpoint.keep": 1,
    "checkpoint.keep_best": 0,
    "logging.samples_every": 0,
    "logging.samples_per_step": 1,
    "logging.record_every": 0,
    "logging.gradient_variance_every": 0,
    "launch.processes": 1,
    "launch.endpoint_minutes": 0,
    "watchdog.first_time_minutes": 0,
}
_ABOVE: dict[str, float] = {
    "rollout.temperature": 0,
    "trainer.eval_top_p": 0,
    "evaluation.confidence": 0.5,
    "evaluation.endpoint.request_seconds": 0,
    "rollout.memory_fraction": 0,
    "rollout.cpu_cache_gib": 0,
    "rollout.sync_tolerance": 0,
    "launch.timeout_minutes": 0,
    "watchdog.default_minutes": 0,
}
_AT_MOST: dict[str, float] = {
    "trainer.eval_top_p": 1,
    "evaluation.confidence": 0.9999,
    "evaluation.endpoint.max_failed_share": 1,
    "rollout.memory_fraction": 1,
}


def _at(config: Config, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), config)


def check_values(config: Config) -> Iterator[str]:
    """Yields a sentence per value that is out of range or not among the choices; `check_algorithm` has its own."""
    for key, choices in _CHOICES.items():
        yield from _choice(key, _at(config, key), choices)
    for key, low in _AT_LEAST.items():
        value = _at(config, key)
        if value is not None and not low <= value < math.inf:
            yield f"`{key}` must be at least {low:g}; it is {value!r}"
    for key, low in _ABOVE.items():
        value = _at(config, key)
        if value is not None and not low < value < math.inf:
            yield f"`{key}` must be greater than {low:g}; it is {value!r}"
    for key, high in _AT_MOST.items():
        if _at(config, key) > high:
            yield f"`{key}` must be at most {high:g}; it is {_at(config, key)!r}"
    for key, section in (("actor.optimizer", config.actor.optimizer), ("sft.optimizer", config.sft.optimizer)):
        yield from _check_optimizer(key, section)
    for key in ("algorithm.entropy_coef", "algorithm.overlong.weight"):
        if not math.isfinite(_at(config, key)):
            yield f"`{key}` must be a finite number; it is {_at(config, key)!r}"
    for phase, minutes in config.watchdog.phases.items():
        yield from _choice("watchdog.phases", phase, PHASES)
        if not 0 < minutes < math.inf:
            yield f"`watchdog.phases.{phase}` must be greater than 0; it is {minutes!r}"
    start = config.watchdog.phases.get("start", config.watchdog.default_minutes)
    if config.watchdog.enabled and (config.launch.endpoint_minutes or 0) >= start:
        yield (
            f"`launch.endpoint_minutes` ({config.launch.endpoint_minutes:g}) must be less than the deadline of the start, in "
            f"which the servers are waited for; raise `watchdog.phases.start` ({start:g})"
        )
    if config.actor.fp8 is not None:
        for name, choices in _FP8_CHOICES.items():
            yield from _choice(f"actor.fp8.{name}", getattr(config.actor.fp8, name), choices)


def _choice(key: str, value: str, choices: Iterable[str]) -> Iterator[str]:
    choices = tuple(choices)
    if value not in choices:
        yield f"`{key}` must be one of {', '.join(choices)}; it is {value!r}; did you mean {closest(value, choices)!r}?"


def _check_optimizer(key: str, optimizer: OptimizerConfig) -> Iterator[str]:
    for name, low in (("min_lr", 0), ("warmup_steps", 0), ("weight_decay", 0), ("clip_grad", 0)):
        if not low <= getattr(optimizer, name) < math.inf:
            yield f"`{key}.{name}` must be at least {low}; it is {getattr(optimizer, name)!r}"
    for name in ("lr", "eps"):
        if not 0 < getattr(optimizer, name) < math.inf:
            yield f"`{key}.{name}` must be greater than 0; it is {getattr(optimizer, name)!r}"
    if optimizer.min_lr > optimizer.lr:
        yield f"`{key}.min_lr` ({optimizer.min_lr}) must not exceed `{key}.lr` ({optimizer.lr})"
    if len(optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in optimizer.betas):
        yield f"`{key}.betas` must be two numbers in [0, 1); it is {optimizer.betas}"
