"""`plan --simulate`: its options, what is simulated, tables and figures."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from megatron_rl.config import Config, ConfigError
from megatron_rl.planning.components import MemoryPlan, Part
from megatron_rl.planning.memory import total_parameters
from megatron_rl.planning.simulation.engines import EngineSpeed
from megatron_rl.planning.simulation.failures import (
    CheckpointInterval,
    Day,
    Failures,
    daly,
    days,
    goodput,
    intervals,
    young,
)
from megatron_rl.planning.simulation.steps import BEGUN, MODES, Latency, Mode, SimulatedJob, SimulatedRun, simulate
from megatron_rl.planning.time.generation import Decoding
from megatron_rl.planning.time.kernels import host_seconds
from megatron_rl.planning.time.lengths import LogNormal, Recorded, read_lengths
from megatron_rl.planning.time.step import GENERATE, REWARD, SYNC, Predictor, StepTime

_DAYS = 200  # simulated
_NEAR = 32  # tokens of context in which passes are taken as equally long
_SPREAD = 0.5  # of a judge's latency: standard deviation of the logarithm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a simulation of steps, response by response")
    group.add_argument("--simulate", action="store_true", help="synchronous steps, and what two other ways would give")
    group.add_argument("--simulated-steps", type=int, default=20, metavar="N", help="default 20")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the responses' lengths and the failures")
    group.add_argument(
        "--drawn-before", action="store_true", help="later epochs: earlier responses say which prompts to begin first"
    )
    group.add_argument(
        "--judge-seconds", type=float, metavar="MEAN", help="of a judge's answer; asked as responses end"
    )
    group.add_argument("--judge-at-once", type=int, default=256, metavar="N", help="answers under way (default 256)")
    group.add_argument("--mtbf-hours", type=float, metavar="H", help="mean time between two failures of one node")
    group.add_argument("--restart-minutes", type=float, default=10.0, metavar="M", help="after a failure (default 10)")
    group.add_argument(
        "--checkpoint-seconds",
        type=float,
        metavar="S",
        help="that a save holds training up (default: over the host's link)",
    )
    group.add_argument("--disk-gb-per-s", type=float, default=5.0, metavar="GB", help="of the whole job (default 5)")


@dataclass(frozen=True)
class Goodput:
    """Over the intervals between checkpoints; `own`: at the recipe's (None: it has no checkpoints)."""

    failures: Failures
    step_seconds: float
    intervals: Sequence[CheckpointInterval]
    own: CheckpointInterval | None
    days: Sequence[Day]  # at the best interval

    @property
    def best(self) -> CheckpointInterval:
        return max(self.intervals, key=lambda interval: interval.goodput)


@dataclass(frozen=True)
class Simulated:
    job: SimulatedJob
    runs: Mapping[Mode, SimulatedRun]
    goodput: Goodput | None


def run(args: argparse.Namespace, config: Config, plan: MemoryPlan, predictor: Predictor, step: StepTime) -> Simulated:
    """Raises:
    ConfigError: an option that cannot be, recorded lengths that are not there.
    """
    above = {
        "--simulated-steps": args.simulated_steps,
        "--judge-at-once": args.judge_at_once,
        "--disk-gb-per-s": args.disk_gb_per_s,
    }
    at_least = {
        "--restart-minutes": args.restart_minutes,
        "--seed": args.seed,
        "--checkpoint-seconds": args.checkpoint_seconds or 0,
    }
    for name, value in above.items() | {("--mtbf-hours", 1.0 if args.mtbf_hours is None else args.mtbf_hours)}:
        if value <= 0:
            raise ConfigError(f"{name} must be above 0")
    for name, value in at_least.items() | {
        ("--judge-seconds", 1.0 if args.judge_seconds is None else args.judge_seconds)
    }:
        if value < 0:
            raise ConfigError(f"{name} must not be below 0")
    job = job_of(args, config, plan, predictor, step)
    modes = MODES if job.engines > 1 else MODES[:2]
    runs = {mode: simulate(job, mode, args.simulated_steps, args.seed) for mode in modes}
    return Simulated(job, runs, _goodput(args, config, plan, predictor, runs["synchronous"]))


def job_of(
    args: argparse.Namespace, config: Config, plan: MemoryPlan, predictor: Predictor, step: StepTime
) -> SimulatedJob:
    """The recipe's step with the times that `predict` gives its parts."""
    decoding = Decoding(plan.model, config.rollout, predictor.hardware, plan.cache_tokens)
    prompt, factor = predictor.lengths.prompt, predictor.factors.get(GENERATE, 1.0)
    phases = {name: seconds for name, seconds in step.seconds.items() if name not in (GENERATE, REWARD)}

    @cache
    def decode_seconds(running: int, context: int) -> float:
        return factor * decoding.step_seconds(running, context)

    def training(tokens: float) -> dict[str, float]:
        more = tokens / step.tokens
        return {name: seconds * (1.0 if name == SYNC else more) for name, seconds in phases.items()}

    lengths: LogNormal | Recorded = LogNormal(predictor.lengths.mean, args.response_spread, config.rollout.max_tokens)
    if args.response_lengths is not None:
        steps = read_lengths(args.response_lengths, config.rollout.max_tokens)
        lengths = Recorded(tuple(group for tokens in steps for group in tokens))
    judge = None
    if args.judge_seconds:
        judge = Latency(args.judge_seconds, _SPREAD, args.judge_at_once)
    elif step.seconds.get(REWARD):
        judge = Latency(step.seconds[REWARD], 0.0, config.trainer.prompts_per_step * config.rollout.group_size)
    return SimulatedJob(
        speed=EngineSpeed(
            lambda running, context: decode_seconds(running, round(context / _NEAR) * _NEAR),
            lambda tokens: factor * decoding.prompt_seconds(tokens, tokens * prompt / 2),
            plan.cache_tokens,
            config.rollout.max_concurrent,
        ),
        engines=plan.engines,
        gpus=plan.world,
        prompts=config.trainer.prompts_per_step,
        count=config.rollout.group_size,
        prompt=prompt,
        lengths=lengths,
        training=training,
        reward=judge,
        drawn_before=args.drawn_before,
    )


def _goodput(
    args: argparse.Namespace, config: Config, plan: MemoryPlan, predictor: Predictor, run: SimulatedRun
) -> Goodput | None:
    if args.mtbf_hours is None:
        return None
    held = plan.bytes_of(Part.WEIGHTS, Part.OPTIMIZER)
    state = (2 + (8 if config.actor.optimizer.moments == "bfloat16" else 12)) * total_parameters(plan.model)
    failures = Failures(
        between=args.mtbf_hours * 3600 / args.nodes,
        restart=args.restart_minutes * 60,
        blocked=host_seconds(predictor.hardware, held) if args.checkpoint_seconds is None else args.checkpoint_seconds,
        write=state / (args.disk_gb_per_s * 1e9),
    )
    tried = intervals(run.seconds, failures)
    best = max(tried, key=lambda interval: interval.goodput).steps
    every = config.checkpoint.every
    return Goodput(
        failures,
        float(run.seconds.mean()),
        tried,
        CheckpointInterval(every, goodput(run.seconds, every, failures)) if every else None,
        days(run.seconds, best, failures, _DAYS, args.seed),
    )


# ------------------------------------------------------------------------------------------------------------ output
def title(name: Mode, run: SimulatedRun) -> str:
    if name == "partial":
        return f"partial rollouts, {BEGUN:g} x as many begun"
    if name == "one step off":
        return f"one step off, {round(run.engines_share * run.gpus)} of {run.gpus} GPUs draw"
    return name


def table(simulated: Simulated) -> str:
    job, run = simulated.job, simulated.runs["synchronous"]
    seconds, total = run.phases() | {"step": run.seconds}, float(run.seconds.mean())
    lengths = (
        f"recorded, of {len(job.lengths.groups)} prompts"
        if isinstance(job.lengths, Recorded)
        else f"log-normal around {job.lengths.mean:,.0f} tokens"
        if isinstance(job.lengths, LogNormal)
        else ""
    )
    lines = [
        f"{len(run.steps)} steps simulated: {job.engines} engines, {job.prompts * job.count:,} responses a step, {lengths}",
        f"{'synchronous, as a run is':40s}{'seconds':>10s}{'median':>10s}{'p95':>10s}{'share':>10s}{'idle':>10s}",
    ]
    for name, values in seconds.items():
        idle = run.idle(None if name == "step" else name)
        lines.append(
            f"{name:40s}{values.mean():10.1f}{np.median(values):10.1f}{np.quantile(values, 0.95):10.1f}"
            f"{values.mean() / total:10.0%}{idle:10.0%}"
        )
    set_back = sum(step.generation.set_back for step in run.steps) / len(run.steps)
    lines += [
        f"the last 5 % of the responses take {run.tail_share:.0%} of {GENERATE}"
        + (
            f"; {set_back:,.0f} times a step a full cache sets a sequence back to be read again later: fewer at once "
            "(rollout.max_concurrent) need less cache"
            if set_back
            else ""
        ),
        "",
        f"{'':40s}{'s / step':>10s}{'p95':>10s}{'tokens/s/GPU':>14s}{'idle GPUs':>11s}",
    ]
    for mode, other in simulated.runs.items():
        lines.append(
            f"{title(mode, other):40s}{other.seconds.mean():10.1f}{np.quantile(other.seconds, 0.95):10.1f}"
            f"{other.tokens_per_s_per_gpu:14,.0f}{other.idle():11.0%}"
            + ("" if mode == "synchronous" else "  not in this product")
        )
    if simulated.goodput is not None:
        lines += ["", *_goodput_lines(simulated.goodput)]
    return "\n".join(lines)


def _goodput_lines(found: Goodput) -> list[str]:
    failures, best, each = found.failures, found.best, found.step_seconds
    kept = np.array([day.kept for day in found.days]) / 86_400
    lines = [
        f"a failure every {failures.between / 3600:,.1f} h: {failures.restart / 60:g} min to restart; a save holds training "
        f"up for {failures.blocked:.1f} s and is written in {failures.write:,.0f} s",
        f"goodput {best.goodput:.1%} at the best interval, {best.steps} step{'s' * (best.steps > 1)} or "
        f"{best.steps * each / 60:,.0f} min of work "
        f"(Young: {young(failures) / 60:,.0f}, Daly: {daly(failures) / 60:,.0f} min)",
        f"{len(found.days)} simulated days: {kept.mean():.1%} in the mean, the worst {kept.min():.1%}",
    ]
    if found.own is not None:
        lines.append(f"with this recipe's checkpoint.every={found.own.steps}: {found.own.goodput:.1%}")
    return lines


def figures(simulated: Simulated) -> dict[str, object]:
    found: dict[str, object] = {
        mode: {
            "seconds": float(run.seconds.mean()),
            "seconds_p50": float(np.median(run.seconds)),
            "seconds_p95": float(np.quantile(run.seconds, 0.95)),
            "tokens_per_s_per_gpu": run.tokens_per_s_per_gpu,
            "idle_share": run.idle(),
            "tail_share": run.tail_share,
            "phases": {
                name: {"seconds": float(values.mean()), "idle_share": run.idle(name)}
                for name, values in run.phases().items()
            },
        }
        for mode, run in simulated.runs.items()
    }
    if simulated.goodput is not None:
        best, own, failures = simulated.goodput.best, simulated.goodput.own, simulated.goodput.failures
        found["goodput"] = {
            "best": {"steps": best.steps, "goodput": best.goodput},
            "recipe": None if own is None else {"steps": own.steps, "goodput": own.goodput},
            "young_seconds": young(failures),
            "daly_seconds": daly(failures),
            "days": [day.kept / 86_400 for day in simulated.goodput.days],
        }
    return {"simulation": found}
