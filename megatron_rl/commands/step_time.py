"""The part of `plan` on time: the predicted time of a step, its options, table and figures."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_rl.config import Config, ConfigError, load_recipe
from megatron_rl.models import Model
from megatron_rl.planning.memory import make_plan
from megatron_rl.planning.time.calibrate import MeasuredRun, calibrated
from megatron_rl.planning.time.hardware import TABLES, Hardware, parse
from megatron_rl.planning.time.lengths import Lengths, read_lengths
from megatron_rl.planning.time.step import GENERATE, SYNC, UPDATE, Predictor, StepTime


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the step's time")
    group.add_argument(
        "--hardware",
        default="h100",
        metavar="NAME",
        help=f"{', '.join(TABLES)}, or a YAML file with values and their `base`; values may follow: h100,network=25e9 "
        "(default h100; docs/layouts-evidence.md has the tables)",
    )
    group.add_argument(
        "--response-lengths",
        type=Path,
        metavar="RUN",
        help="a run folder, or one of its rollouts/step_<n>.npz: lengths as recorded there, in place of the next two",
    )
    group.add_argument("--response-tokens", type=float, metavar="MEAN", help="default: half of rollout.max_tokens")
    group.add_argument(
        "--response-spread",
        type=float,
        default=0.6,
        metavar="SIGMA",
        help="standard deviation of the logarithm of a response's length (default 0.6)",
    )
    group.add_argument(
        "--prompt-tokens", type=float, metavar="MEAN", help="default: a quarter of rollout.max_prompt_tokens"
    )
    group.add_argument(
        "--reward-seconds",
        type=float,
        metavar="S",
        help="scoring after the last response (default: that of --calibrate, or 0)",
    )
    group.add_argument(
        "--calibrate",
        metavar="RUN",
        help="a run's folder: phases are scaled so that its own times come out, and its lengths are taken",
    )


def hardware(args: argparse.Namespace) -> Hardware:
    """Raises:
    ConfigError: an unknown name, or a value that is no number above 0.
    """
    return parse(args.hardware)


_FAR = 5  # a factor between a run's time and its prediction that only other hardware explains


def predictor(
    args: argparse.Namespace, config: Config, model: Model, sizes: Callable[[Config], Model], gpu_bytes: float
) -> Predictor:
    """`sizes`: the model of another recipe, that of the run to calibrate with.

    Raises:
        ConfigError: lengths that cannot be, or a folder that is no run's.
    """
    if args.reward_seconds is not None and args.reward_seconds < 0:
        raise ConfigError("--reward-seconds must not be below 0")
    limit = config.rollout.max_tokens
    prompt = config.rollout.max_prompt_tokens / 4 if args.prompt_tokens is None else args.prompt_tokens
    try:
        run = None if args.calibrate is None else MeasuredRun.read(Path(args.calibrate))
        if args.response_lengths is not None:
            recorded = read_lengths(args.response_lengths, limit)
            lengths = Lengths.recorded(np.concatenate([tokens.ravel() for tokens in recorded]), prompt)
        else:
            mean = limit / 2 if args.response_tokens is None else args.response_tokens
            lengths = Lengths.log_normal(mean, limit, spread=args.response_spread, prompt=prompt)
    except ValueError as error:
        raise ConfigError(f"--response-..., --calibrate: {error}") from None
    made = Predictor(model, parse(args.hardware), lengths)
    if run is not None:
        ran = load_recipe(run.folder / "recipe.yaml")
        own = sizes(ran)
        given = args.response_tokens is not None or args.response_lengths is not None
        measured = calibrated(replace(made, model=own), run, ran, make_plan(ran, own, run.gpus, gpu_bytes))
        made = replace(measured, model=model, lengths=lengths if given else run.lengths)
    return made if args.reward_seconds is None else replace(made, reward_seconds=args.reward_seconds)


def figures(step: StepTime) -> dict[str, object]:
    return {
        "seconds": {**step.seconds, "step": step.total},
        "tokens_per_s_per_gpu": step.tokens_per_s_per_gpu,
        "bounds": dict(step.bounds),
        "bubble_share": step.bubble,
        "tail_idle_share": step.generation.idle,
        "microbatches": step.microbatches,
    }


def rate_of(phase: str, rates: Mapping[str, float]) -> str:
    """Tokens per second, as text; empty for a phase that moves weights."""
    return "" if phase == SYNC or phase not in rates else f"{rates[phase]:,.0f}"


def table(step: StepTime, predictor: Predictor, config: Config) -> str:
    """A line per phase, and what waits."""
    lengths, rates = predictor.lengths, step.tokens_per_s_per_gpu
    longest = lengths.longest(step.responses / lengths.mean)
    lines = [
        f"a step on {predictor.hardware.name}: {step.tokens / 1e6:.2f} M tokens, prompts of {lengths.prompt:,.0f} and "
        f"responses of {lengths.mean:,.0f} in the mean, the longest about {longest:,.0f}",
        f"{_kind(predictor, config):40s}{'seconds':>10s}{'share':>10s}{'tokens/s/GPU':>14s}  bounded by",
    ]
    for name, seconds in step.seconds.items():
        lines.append(
            f"{name:40s}{seconds:10.1f}{seconds / step.total:10.0%}{rate_of(name, rates):>14s}  {step.bounds.get(name, '')}"
        )
    lines.append(f"{'step':40s}{step.total:10.1f}{1:10.0%}{rates['step']:14,.0f}")
    waits = [
        f"{step.generation.idle:.0%} of the engines' places are empty while the longest responses end ({GENERATE})"
    ]
    if step.bubble > 0:
        waits.append(f"the pipeline's bubble is {step.bubble:.0%} of the {UPDATE}")
    lines.append("; ".join(waits))
    if factors := predictor.factors:
        took = ", ".join(f"{name} {factor:.3g}" for name, factor in factors.items())
        far = any(not 1 / _FAR < factors.get(name, 1.0) < _FAR for name in (GENERATE, UPDATE))
        doubt = (
            f": it did not run on {predictor.hardware.name}, and of another recipe this predicts nothing" if far else ""
        )
        lines.append(f"the run's times, as multiples of their prediction: {took}{doubt}")
    return "\n".join(lines)


def _kind(predictor: Predictor, config: Config) -> str:
    if predictor.factors:
        return "predicted, scaled to a run's times"
    return "predicted" + (" at the rates of bf16" if config.model.dtype == "float32" else ", not timed on a GPU")
