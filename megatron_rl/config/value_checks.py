"""What must hold for single values of a recipe: enumerations and ranges."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from megatron_rl.config.schema import PHASES, Config, OptimizerConfig
from megatron_rl.names import did_you_mean

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

_MINUTES, _SECONDS = (0.001, 1e6), (0.001, 1e8)  # 0.06 s to two years; 1 ms to three years
_COUNT, _STEPS, _TOKENS, _RANKS = 1e6, 1e9, 1e9, 1e5

# Smallest and largest value, both allowed. The largest is far above what anyone runs; it is there for a typo of some zeros,
# which otherwise shows when memory runs out hours later, or never.
_RANGES: dict[str, tuple[float, float]] = {
    "seed": (0, 2**32 - 1),  # what numpy's generators take
    "trainer.steps": (1, _STEPS),
    "trainer.prompts_per_step": (1, _COUNT),
    "trainer.minibatches": (1, _COUNT),
    "trainer.epochs": (1, _COUNT),
    "trainer.eval_every": (0, _STEPS),
    "trainer.eval_rollouts": (1, _COUNT),
    "trainer.eval_temperature": (0, 2),  # vLLM's
    "trainer.eval_max_prompts": (1, _STEPS),
    "evaluation.length_limit": (1, _TOKENS),
    "evaluation.endpoint.max_in_flight": (1, _COUNT),
    "evaluation.endpoint.request_seconds": _SECONDS,
    "evaluation.endpoint.retries": (0, _COUNT),
    "evaluation.endpoint.max_failed_share": (0, 1),
    "rollout.tensor_parallel": (1, _RANKS),
    "rollout.group_size": (1, 1e5),
    "rollout.max_prompt_tokens": (1, _TOKENS),
    "rollout.max_tokens": (1, _TOKENS),
    "rollout.max_concurrent": (1, _COUNT),
    "rollout.sync_check_rollouts": (1, _COUNT),
    "rollout.cpu_cache_gib": (0.001, 1e6),
    "actor.parallel.tensor": (1, _RANKS),
    "actor.parallel.pipeline": (1, _RANKS),
    "actor.parallel.virtual_pipeline": (1, _RANKS),
    "actor.parallel.context": (1, _RANKS),
    "actor.parallel.expert": (1, _RANKS),
    "actor.parallel.expert_tensor": (1, _RANKS),
    "actor.tokens_per_microbatch": (1, _TOKENS),
    "actor.logprob_chunk_tokens": (1, _TOKENS),
    "algorithm.max_length": (1, _TOKENS),
    "algorithm.overlong.max_length": (1, _TOKENS),
    "algorithm.resample_rounds": (0, _COUNT),
    "sft.steps": (0, _STEPS),
    "sft.batch_size": (1, _COUNT),
    "sft.log_every": (1, _STEPS),
    "checkpoint.sft_every": (0, _STEPS),
    "checkpoint.every": (0, _STEPS),
    "checkpoint.keep": (1, _COUNT),
    "checkpoint.keep_best": (0, _COUNT),
    "logging.samples_every": (0, _STEPS),
    "logging.samples_per_step": (1, _STEPS),
    "logging.record_every": (0, _STEPS),
    "logging.gradient_variance_every": (0, _STEPS),
    "launch.processes": (1, 4096),
    "launch.timeout_minutes": _MINUTES,
    "launch.endpoint_minutes": (0, 1e6),
    "watchdog.default_minutes": _MINUTES,
    "watchdog.first_time_minutes": (0, 1e6),
}
_ABOVE: dict[str, tuple[float, float]] = {  # greater than the first, at most the second
    "rollout.temperature": (0, 2),  # vLLM's
    "trainer.eval_top_p": (0, 1),
    "evaluation.confidence": (0.5, 0.9999),
    "rollout.memory_fraction": (0, 1),
    "rollout.sync_tolerance": (0, 1e6),
}
_FINITE = ("algorithm.entropy_coef", "algorithm.overlong.weight", "trainer.eval_threshold")
_MOST_ROLLOUTS = 1e8  # of a step: all of them are in the memory of every rank


def _at(config: Config, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), config)


def check_values(config: Config) -> Iterator[str]:
    """Yields a sentence per value that is out of range or not among the choices; `check_algorithm` has its own."""
    for key, choices in _CHOICES.items():
        yield from _choice(key, _at(config, key), choices)
    for key, (low, high) in _RANGES.items():
        value = _at(config, key)
        if value is not None and not low <= value <= high:
            yield f"`{key}` must be {_between(low, high, value)}; it is {value!r}"
    for key, (low, high) in _ABOVE.items():
        value = _at(config, key)
        if value is not None and not low < value <= high:
            bound = f"at most {high:g}" if value > low else f"greater than {low:g}"
            yield f"`{key}` must be {bound}; it is {value!r}"
    rollouts = config.trainer.prompts_per_step * config.rollout.group_size
    if rollouts > _MOST_ROLLOUTS:
        yield (
            f"a step has {rollouts:,} rollouts (`trainer.prompts_per_step` {config.trainer.prompts_per_step:,} x "
            f"`rollout.group_size` {config.rollout.group_size:,}); at most {_MOST_ROLLOUTS:,.0f} are possible: lower one"
        )
    for key, section in (("actor.optimizer", config.actor.optimizer), ("sft.optimizer", config.sft.optimizer)):
        yield from _check_optimizer(key, section)
    for key in _FINITE:
        if not math.isfinite(_at(config, key)):
            yield f"`{key}` must be a finite number; it is {_at(config, key)!r}"
    for phase, minutes in config.watchdog.phases.items():
        yield from _choice("watchdog.phases", phase, PHASES)
        low, high = _MINUTES
        if not low <= minutes <= high:
            yield f"`watchdog.phases.{phase}` must be {_between(low, high, minutes)}; it is {minutes!r}"
    start = config.watchdog.phases.get("start", config.watchdog.default_minutes)
    if config.watchdog.enabled and (config.launch.endpoint_minutes or 0) >= start:
        yield (
            f"`launch.endpoint_minutes` ({config.launch.endpoint_minutes:g}) must be less than the deadline of the start, in "
            f"which the servers are waited for; raise `watchdog.phases.start` ({start:g})"
        )
    if config.actor.fp8 is not None:
        for name, choices in _FP8_CHOICES.items():
            yield from _choice(f"actor.fp8.{name}", getattr(config.actor.fp8, name), choices)


def _between(low: float, high: float, value: float) -> str:
    """The bound that `value` breaks, in words; a NaN breaks both."""
    if value < low:
        return f"at least {low:g}"
    return f"at most {high:,.0f}" if value > high else f"a number from {low:g} to {high:,.0f}"


def _choice(key: str, value: str, choices: Iterable[str]) -> Iterator[str]:
    choices = tuple(choices)
    if value not in choices:
        yield f"`{key}` must be one of {', '.join(choices)}; it is {value!r}{did_you_mean(value, choices)}"


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
