"""What a recipe's way of drawing takes of a plain step's generation.

The ways are partial rollouts, steps of like lengths and dynamic sampling. A plain step draws its groups at once and to their
ends, and `planning.time` has a formula for that. The other ways are simulated, with the code that decides in a run, beside
plain steps of the same job.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

from megatron_rl.config import Config
from megatron_rl.planning.components import MemoryPlan
from megatron_rl.planning.simulation.engines import EngineSpeed
from megatron_rl.planning.simulation.simulated_steps import Mode, Resampling, SimulatedJob, SimulatedRun, simulate
from megatron_rl.planning.time.generation import Decoding
from megatron_rl.planning.time.lengths import Lengths, LogNormal, Recorded
from megatron_rl.planning.time.step import GENERATE

_NEAR = 32  # tokens of context in which passes are taken as equally long
_STEPS, _SEED = 4, 0


@dataclass(frozen=True)
class SimulatedShare:
    """Predicts generation's seconds over those of a plain step; 1 for a recipe whose steps are plain.

    Attributes:
        to_draw: whence lengths are drawn, by their mean and the limit.
        signal_share: of the groups, which others replace where the recipe says so.
    """

    to_draw: Callable[[float, int], LogNormal | Recorded]
    signal_share: float = 1.0
    _known: dict[tuple[object, ...], float] = field(default_factory=dict, repr=False)

    def __call__(self, config: Config, plan: MemoryPlan, decoding: Decoding, lengths: Lengths) -> float:
        """Simulates once for each kind of engine: `--search` asks for many layouts of the actor beside the same ones."""
        resampling = resampling_of(config, self.signal_share)
        mode, block = way_of(config), config.trainer.like_lengths
        if (mode == "synchronous" and resampling is None) or plan.full_length_sequences < 1:
            return 1.0
        size = round(math.log2(plan.cache_tokens))  # of twice the cache a share of its own
        engine = decoding.rollout
        key = (
            plan.engines,
            engine.tensor_parallel,
            engine.expert_parallel,
            engine.fp8,
            size,
            lengths.mean,
            lengths.prompt,
        )
        if key not in self._known:
            job = job_of(config, plan, decoding, lengths.prompt, self.to_draw(lengths.mean, config.rollout.max_tokens))
            plain = replace(job, drawn_before=block > 1)
            own = replace(plain, resampling=resampling)
            steps = block if block > 1 else _STEPS
            self._known[key] = _mean(simulate(own, mode, steps, _SEED)) / _mean(
                simulate(plain, "synchronous", steps, _SEED)
            )
        return self._known[key]


def way_of(config: Config) -> Mode:
    """How a recipe draws a step's responses, beside dynamic sampling. In split placement too, of its generators."""
    if config.rollout.partial is not None:
        return "partial"
    return "steps of like lengths" if config.trainer.like_lengths > 1 else "synchronous"


def resampling_of(config: Config, signal_share: float) -> Resampling | None:
    """`signal_share`: of the groups; where all have a signal none is replaced."""
    algorithm = config.algorithm
    if not algorithm.resample_rounds or signal_share >= 1:
        return None
    return Resampling(signal_share, algorithm.resample_rounds, algorithm.resample_ahead)


def job_of(
    config: Config,
    plan: MemoryPlan,
    decoding: Decoding,
    prompt: float,
    lengths: LogNormal | Recorded,
    factor: float = 1.0,
) -> SimulatedJob:
    """The recipe's generation, without what else a step has. `factor`: measured over predicted seconds."""

    @cache
    def decode_seconds(running: int, context: int) -> float:
        return factor * decoding.step_seconds(running, context)

    return SimulatedJob(
        speed=EngineSpeed(
            lambda running, context: decode_seconds(running, round(context / _NEAR) * _NEAR),
            lambda tokens: factor * decoding.prompt_seconds(tokens, tokens * prompt / 2),
            plan.cache_tokens,
            config.rollout.max_concurrent,
            plan.state_tokens,
        ),
        engines=plan.engines,
        gpus=plan.world,
        prompts=config.trainer.prompts_per_step,
        count=config.rollout.group_size,
        prompt=prompt,
        lengths=lengths,
        training=lambda tokens: {},
        like_lengths=config.trainer.like_lengths,
        partial=config.rollout.partial,
    )


def _mean(run: SimulatedRun) -> float:
    return float(run.phases()[GENERATE].mean())
