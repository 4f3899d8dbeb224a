"""A recipe's steps, simulated response by response, and what checkpoints and failures leave of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_rl.config import Config
from megatron_rl.planning.components import MemoryPlan, Part
from megatron_rl.planning.inputs import Responses
from megatron_rl.planning.memory import cache_bytes_per_token, total_parameters
from megatron_rl.planning.simulation.failures import CheckpointInterval, Failures, goodput, intervals
from megatron_rl.planning.simulation.generation_share import job_of, resampling_of
from megatron_rl.planning.simulation.simulated_steps import MODES, Latency, Mode, SimulatedJob, SimulatedRun, simulate
from megatron_rl.planning.time.kernels import host_seconds
from megatron_rl.planning.time.lengths import LogNormal
from megatron_rl.planning.time.step import GENERATE, REWARD, SYNC, Predictor, StepTime

_JUDGE_SPREAD = 0.5  # of a judge's latency: standard deviation of the logarithm
_DISK = 5e9  # bytes per second that the whole job writes
_SEED = 0


@dataclass(frozen=True)
class Simulation:
    """The simulated job, beside the recipe.

    Attributes:
        steps: how many.
        responses: whence lengths are drawn.
        drawn_before: earlier responses to the same prompts say which to begin first.
        judge: mean seconds of a judge's answer, and how many are under way; None: rewards take what the step's time has.
        failures: mean seconds between two failures of the whole job, and until it runs again; None: there are none.
        signal_share: of the groups, which others replace where the recipe says so.
    """

    steps: int
    responses: Responses
    drawn_before: bool = False
    judge: tuple[float, int] | None = None
    failures: tuple[float, float] | None = None
    signal_share: float = 1.0


@dataclass(frozen=True)
class Goodput:
    """Over the intervals between checkpoints; `recipe`: at the recipe's (None: it has no checkpoints)."""

    failures: Failures
    step_seconds: float
    intervals: Sequence[CheckpointInterval]
    recipe: CheckpointInterval | None

    @property
    def best(self) -> CheckpointInterval:
        return max(self.intervals, key=lambda interval: interval.goodput)


@dataclass(frozen=True)
class Forecast:
    job: SimulatedJob
    runs: Mapping[Mode, SimulatedRun]
    goodput: Goodput | None


def forecast(
    what: Simulation,
    config: Config,
    plan: MemoryPlan,
    predictor: Predictor,
    step: StepTime,
    engines_share: float | None = None,
) -> Forecast:
    """Simulated steps of a checked recipe, in every mode. `engines_share`: one step off, see `SimulatedJob`.

    Raises:
        ValueError: an engine's cache does not hold the longest sequence.
    """
    job = replace(_job(what, config, plan, predictor, step), engines_share=engines_share)
    runs = {mode: simulate(job, mode, what.steps, _SEED) for mode in _modes(job)}
    return Forecast(job, runs, _goodput(what, config, plan, predictor, runs["synchronous"]))


def _modes(job: SimulatedJob) -> Sequence[Mode]:
    """The modes that say something of the job."""
    longest = job.prompt + (
        job.lengths.limit if isinstance(job.lengths, LogNormal) else max(map(np.max, job.lengths.groups))
    )
    impossible = {
        "partial": job.resampling is not None,
        "passes under the tail": job.resampling is not None or (job.cache_beside or longest) < longest,
        "steps of like lengths": job.resampling is not None or not job.drawn_before,
        "one step off": job.resampling is not None or job.engines == 1,
    }
    return [mode for mode in MODES if not impossible.get(mode)]


def _job(what: Simulation, config: Config, plan: MemoryPlan, predictor: Predictor, step: StepTime) -> SimulatedJob:
    """The recipe's step with the times that are predicted of its parts."""
    decoding, factor = predictor.decoding(config, plan), predictor.factors.get(GENERATE, 1.0)
    phases = {name: seconds for name, seconds in step.seconds.items() if name not in (GENERATE, REWARD)}
    lengths = what.responses.to_draw(predictor.lengths.mean, config.rollout.max_tokens)

    def training(tokens: float) -> dict[str, float]:
        more = tokens / step.tokens
        return {name: seconds * (1.0 if name == SYNC else more) for name, seconds in phases.items()}

    judge = None
    if what.judge is not None:
        judge = Latency(what.judge[0], _JUDGE_SPREAD, what.judge[1])
    elif step.seconds.get(REWARD):
        judge = Latency(step.seconds[REWARD], 0.0, config.trainer.prompts_per_step * config.rollout.group_size)
    return replace(
        job_of(config, plan, decoding, predictor.lengths.prompt, lengths, factor),
        training=training,
        reward=judge,
        drawn_before=what.drawn_before,
        resampling=resampling_of(config, what.signal_share),
        cache_beside=_cache_beside(config, plan),
    )


def _cache_beside(config: Config, plan: MemoryPlan) -> float | None:
    """Tokens of an engine's cache, where the actor's weights, which else are on the host meanwhile, take their part of it."""
    if not config.actor.offload_weights:
        return None
    of_token = cache_bytes_per_token(plan.model, config.rollout.tensor_parallel)
    return plan.cache_tokens - plan.bytes_of(Part.WEIGHTS) / of_token


def _goodput(
    what: Simulation, config: Config, plan: MemoryPlan, predictor: Predictor, run: SimulatedRun
) -> Goodput | None:
    if what.failures is None:
        return None
    between, restart = what.failures
    state = (2 + (8 if config.actor.optimizer.moments == "bfloat16" else 12)) * total_parameters(plan.model)
    failures = Failures(
        between=between,
        restart=restart,
        blocked=host_seconds(predictor.hardware, plan.bytes_of(Part.WEIGHTS, Part.OPTIMIZER)),
        write=state / _DISK,
    )
    every = config.checkpoint.every
    return Goodput(
        failures,
        float(run.seconds.mean()),
        intervals(run.seconds, failures),
        CheckpointInterval(every, goodput(run.seconds, every, failures)) if every else None,
    )
