"""The phases of a step, in seconds, by the names of `timing_s/...`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from megatron_rl.config import Config
from megatron_rl.config.actor import ActorConfig, ParallelConfig
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.models import Model
from megatron_rl.planning.components import MemoryPlan, Parameters, Part
from megatron_rl.planning.memory import engine_weight_bytes, total_parameters, trained_parameters
from megatron_rl.planning.time.generation import Decoding, GenerationTime
from megatron_rl.planning.time.hardware import Hardware
from megatron_rl.planning.time.kernels import CommGroup, host_seconds, memory_seconds
from megatron_rl.planning.time.lengths import Lengths
from megatron_rl.planning.time.training import Cost, Training

GENERATE, REWARD, SWITCH, OLD, REFERENCE, UPDATE, SYNC = (
    "generate",
    "reward",
    "switch",
    "old_log_prob",
    "ref_log_prob",
    "update",
    "sync",
)
_SAMPLES = 256  # sequences whose packing stands for that of all


@dataclass(frozen=True)
class StepTime:
    """A step's prediction.

    Attributes:
        seconds: of each phase, in order; phases that the recipe has not are left out.
        tokens: of a step: prompts and responses; `responses` without prompts.
        gpus: of the job.
        bounds: what takes most of a phase.
        generation, update: with what they are made of.
        microbatches: of a data-parallel rank and optimizer step.
        beside: phases of GPUs that only generate, which go on beside the others, up to the sync.
        generation_share: see `Predictor`; `generation` itself is a plain step's.
    """

    seconds: Mapping[str, float]
    tokens: float
    responses: float
    gpus: int
    bounds: Mapping[str, str]
    generation: GenerationTime
    update: Cost
    microbatches: int
    beside: tuple[str, ...] = ()
    generation_share: float = 1.0

    @property
    def total(self) -> float:
        sync = self.seconds.get(SYNC, 0.0)
        drawing = sum(self.seconds.get(name, 0.0) for name in self.beside)
        return max(drawing, sum(self.seconds.values()) - drawing - sync) + sync

    @property
    def tokens_per_s_per_gpu(self) -> dict[str, float]:
        """Tokens/s per GPU of each phase and of the step; of generation, of responses."""
        phases = {
            name: (self.responses if name == GENERATE else self.tokens) / seconds / self.gpus
            for name, seconds in self.seconds.items()
            if seconds > 0
        }
        return phases | {"step": self.tokens / self.total / self.gpus}

    @property
    def bubble(self) -> float:
        """Share of the update in which stages of the pipeline wait for their first and last micro-batch."""
        return self.update.bubble / self.update.seconds


@dataclass(frozen=True)
class Predictor:
    """The quantities common to all layouts of a recipe; `of` gives a layout's step.

    Attributes:
        reward_seconds: what scoring takes after the last response.
        factors: measured over predicted seconds, by phase (`calibrate`).
        others: seconds of phases that are not predicted, measured.
        drafted_share: see `Decoding`.
        generation_share: generation's seconds over those of a step that draws its groups at once and to their ends, by
            recipe, plan, engine and lengths; None: 1.
    """

    model: Model
    hardware: Hardware
    lengths: Lengths
    reward_seconds: float = 0.0
    factors: Mapping[str, float] = field(default_factory=dict)
    others: Mapping[str, float] = field(default_factory=dict)
    drafted_share: float = 0.0
    generation_share: Callable[[Config, MemoryPlan, Decoding, Lengths], float] | None = None

    @cached_property
    def _held(self) -> dict[tuple[int, ...], Parameters]:
        return {}

    def held(self, actor: ActorConfig) -> Parameters:
        """`trained_parameters`, computed once for a search's many layouts with the same cut of the weights."""
        parallel = actor.parallel
        cut = (
            0 if actor.lora is None else actor.lora.rank,
            actor.freeze_vision_tower,
            parallel.tensor,
            parallel.pipeline,
            parallel.virtual_pipeline,
            parallel.expert,
            parallel.expert_tensor,
        )
        if cut not in self._held:
            self._held[cut] = trained_parameters(self.model, actor)
        return self._held[cut]

    def decoding(self, config: Config, plan: MemoryPlan) -> Decoding:
        cache = plan.cache_tokens, plan.state_tokens
        return Decoding(self.model, config.rollout, self.hardware, *cache, self.drafted_share)

    def of(self, config: Config, plan: MemoryPlan) -> StepTime:
        """A checked recipe in the layout that `plan` is of."""
        decoding = self.decoding(config, plan)
        responses = config.trainer.prompts_per_step * config.rollout.group_size
        generation = decoding.generate(responses / plan.engines, responses, self.lengths)
        batches, forward, update = self._training(config, plan.actor_world)
        host = host_seconds(self.hardware, plan.bytes_of(Part.OPTIMIZER)) if config.actor.offload else 0.0
        weights_host = host_seconds(self.hardware, plan.bytes_of(Part.WEIGHTS)) if config.actor.offload_weights else 0.0
        share = 1.0 if self.generation_share is None else self.generation_share(config, plan, decoding, self.lengths)
        seconds = {GENERATE: share * generation.seconds, REWARD: self.reward_seconds}
        bounds = {GENERATE: generation.bound, REWARD: "the reward", OLD: forward.largest, UPDATE: update.largest}
        scored = _scored_share(config)
        # What returns does so under the first pass.
        seconds[OLD] = (max(scored * forward.seconds, host) if scored else 0.0) + weights_host
        if _has_reference(config):
            weights = 2 * plan.parameters.total
            seconds[REFERENCE] = forward.seconds + 2 * host_seconds(self.hardware, weights)
            bounds[REFERENCE] = forward.largest
        seconds[UPDATE] = update.seconds if scored else max(update.seconds, host)
        moved = sync_seconds(self.model, config, plan, self.hardware)
        out = host + weights_host
        seconds[SYNC], bounds[SYNC] = moved + out, "the host's link" if out > moved else "the weights' way"
        scaled = {name: value * self.factors.get(name, 1.0) for name, value in seconds.items() if value}
        return StepTime(
            {**scaled, **self.others},
            responses * self.lengths.total,
            responses * self.lengths.mean,
            plan.world,
            bounds,
            generation,
            update,
            batches,
            (GENERATE, REWARD) if plan.generators else (),
            share,
        )

    def _training(self, config: Config, world: int) -> tuple[int, Cost, Cost]:
        """Micro-batches of an optimizer step, the log-probs' pass, and the whole update."""
        training = Training(self.model, config.actor, world, self.hardware, held=self.held(config.actor))
        optimizer_steps = config.trainer.minibatches * config.trainer.epochs
        per_rank = config.trainer.prompts_per_step * config.rollout.group_size / training.data_parallel
        batches, tokens, pairs = self._packing(config, per_rank / config.trainer.minibatches)
        once = training.passes(batches, tokens, pairs, train=True) + training.optimizer()
        update = (once + training.data_communication(tokens, pairs)) * optimizer_steps
        return batches, training.passes(*self._packing(config, per_rank), train=False), update

    def training_seconds(self, config: Config, world: int) -> float:
        """Seconds of a step that depend on the actor's layout: log-probs, the reference's too, and the update."""
        _, forward, update = self._training(config, world)
        scale = self.factors.get
        reference = forward.seconds * scale(REFERENCE, 1.0) if _has_reference(config) else 0.0
        old = _scored_share(config) * forward.seconds * scale(OLD, 1.0)
        return old + reference + update.seconds * scale(UPDATE, 1.0)

    def _packing(self, config: Config, sequences: float) -> tuple[int, float, float]:
        """Micro-batches of a data-parallel rank for so many sequences, and tokens and pairs in each. With virtual stages they
        are a multiple of the stages (`Actor.micro_batches`)."""
        fill = _fill(self.lengths, config.actor.tokens_per_microbatch)
        tokens = sequences * self.lengths.total
        count = max(1, math.ceil(tokens / (fill * config.actor.tokens_per_microbatch) - 1e-6))
        parallel = config.actor.parallel
        if parallel.virtual_pipeline > 1:
            count += -count % parallel.pipeline
        return count, tokens / count, tokens / count / self.lengths.total * self.lengths.pairs


def _scored_share(config: Config) -> float:
    """Share of the minibatches whose old log-probs have a pass of their own: not the first, whose update computes them
    (`Learner.update`), where nothing needs them earlier."""
    correction = config.algorithm.correction
    if correction.weight != "none" or correction.filters or (config.actor.lora and config.actor.lora.dropout):
        return 1.0
    return 1 - 1 / config.trainer.minibatches


def _has_reference(config: Config) -> bool:
    return config.algorithm.kl.coef > 0 or config.algorithm.kl.reward_coef > 0


@cache
def _fill(lengths: Lengths, budget: int) -> float:
    """Share of the budget that sequences fill where the longest are packed first."""
    room: list[float] = []
    samples = [min(float(budget), lengths.prompt + value) for value in lengths.quantiles(_SAMPLES)]
    for value in reversed(samples):
        place = next((i for i, free in enumerate(room) if free >= value), None)
        if place is None:
            room.append(budget - value)
        else:
            room[place] -= value
    # The last bin of so few sequences is as empty as chance has it.
    whole = len(room) - 1 + (1 - room[-1] / budget) if len(room) > 1 else 1.0
    return min(1.0, sum(samples) / (whole * budget)) if len(room) > 1 else 1.0


def sync_bytes(model: Model, parallel: ParallelConfig, rollout: RolloutConfig) -> float:
    """Bytes of weights in bf16 that a rank receives: its slice of the engine's less what it holds of that in its stage;
    counted by `weights.sync_plan` to a few per cent (`rollout.sync: whole`: everything)."""
    if rollout.sync == "whole":
        return 2.0 * total_parameters(model)
    engine = rollout.tensor_parallel
    experts = 2.0 * model.expert_numbers / engine
    dense = engine_weight_bytes(model, _unquantised(rollout), 2) - experts
    held = dense * _shared(parallel.tensor, engine)
    if parallel.expert_tensor == 1:
        held += experts * (_shared(parallel.expert, engine) if rollout.expert_parallel else 1 / parallel.expert)
    return dense + experts - held / parallel.pipeline


def _shared(actor: int, engine: int) -> float:
    """The part of an engine's slices that the rank with least of it has as one of `actor` slices."""
    return min(1.0, engine / actor) if actor == engine or 1 in (actor, engine) else 0.0


def sync_seconds(model: Model, config: Config, plan: MemoryPlan, hardware: Hardware) -> float:
    """The weights' way into the engines: `sync_bytes`, from the rank's own domain where that has all stages, else over the
    network; and three times through memory (packed, received, put in place)."""
    parallel, rollout = config.actor.parallel, config.rollout
    moved = sync_bytes(model, parallel, rollout)
    placed = moved if rollout.sync == "whole" else engine_weight_bytes(model, _unquantised(rollout), 2)
    copy = max(1, parallel.pipeline * max(parallel.tensor, parallel.expert * parallel.expert_tensor))  # ranks
    near = CommGroup(hardware, copy).near / copy
    links = max(
        near * moved / (hardware.nvlink * hardware.nvlink_share),
        (1 - near) * moved / (hardware.network * hardware.network_share),
    )
    return links + memory_seconds(hardware, 3 * placed)


def _unquantised(rollout: RolloutConfig) -> RolloutConfig:
    return replace(rollout, fp8="none")
