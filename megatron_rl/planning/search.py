"""The layouts of a recipe on so many GPUs: which the recipe check accepts, which fit, and how long a step takes in each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_rl.config import Config, ConfigError, Machine, check
from megatron_rl.config.actor import ActorConfig, FP8Config, ParallelConfig
from megatron_rl.config.model_checks import uncuttable
from megatron_rl.config.pipeline_split import stage_layers
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.models import HFConfig, Model
from megatron_rl.planning.components import GENERATE, PHASES, UPDATE, MemoryPlan, Part
from megatron_rl.planning.memory import make_plan
from megatron_rl.planning.time.step import Predictor, StepTime

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_VIRTUAL = (1, 2, 3, 4, 6)
_TOKENS = (16384, 32768, 65536)
_STEP = 5  # per cent of the GPU between shares for an engine
_SHARES = 3  # of them for each engine: the largest that fits and the next smaller ones
_SLOWER = 1.2  # layouts that train slower than the fastest with as much headroom by this are not looked at further
_LEAST = 2**30  # bytes: the first headroom above none


@dataclass(frozen=True)
class Found:
    """A layout that fits, and its step."""

    config: Config
    plan: MemoryPlan
    step: StepTime

    @property
    def headroom(self) -> float:
        """Bytes that are free in the phase that needs most."""
        return self.plan.gpu_bytes - max(map(self.plan.peak, PHASES))


@dataclass(frozen=True)
class Space:
    """The searched layouts: the recipe `config` on the machines, its model, and whether FP8 is tried where it has bf16.

    Attributes:
        machine: with its world.
        headroom: bytes that have to stay free on every GPU.
    """

    config: Config
    model: Model
    hf_config: HFConfig
    machine: Machine
    gpu_bytes: float
    headroom: float = 0.0
    fp8: bool = False

    @property
    def gpus(self) -> int:
        return self.machine.world_size or 1

    @property
    def world(self) -> int:
        """GPUs of the actor."""
        return self.gpus - (self.config.launch.generators or 0)

    def splits(self) -> Iterator[Space]:
        """Yields this space; with split placement one for each of up to seven numbers of generators, whole nodes of them."""
        if self.config.launch.generators is None:
            yield self
            return
        node = self.machine.local_world_size or 1
        unit = node if self.gpus > node else 1
        for count in sorted({max(1, self.gpus // unit * part // 8) * unit for part in range(1, 8)} - {self.gpus}):
            launch = replace(self.config.launch, generators=count)
            yield replace(self, config=replace(self.config, launch=launch))

    def accepts(self, config: Config) -> bool:
        """Whether the recipe check does."""
        try:
            check(config, machine=self.machine, model=self.hf_config)
        except ConfigError:
            return False
        return True

    def check_alone(self) -> None:
        """Raises ConfigError with what the recipe check says of the recipe in the smallest layout."""
        actor = replace(
            self.config.actor, parallel=ParallelConfig(), moe=replace(self.config.actor.moe, dispatcher="alltoall")
        )
        rollout = replace(self.config.rollout, tensor_parallel=1, expert_parallel=False)
        check(self.recipe(actor, rollout), machine=self.machine, model=self.hf_config)

    def given(self, predictor: Predictor) -> Found | None:
        """The recipe's own layout, where it can run on the machines."""
        if not self.accepts(self.config):
            return None
        plan = self.plan(self.config)
        return Found(self.config, plan, predictor.of(self.config, plan)) if plan.full_length_sequences >= 1 else None

    # -------------------------------------------------------------------------------------------------- candidates
    def parallels(self) -> Iterator[ParallelConfig]:
        """Layouts that the ranks divide into, tensor-parallel within a node; before the recipe check."""
        dims, node = self.model.dims, self.machine.local_world_size or 1
        tensors = [size for size in _SIZES if size <= node]
        pipelines = [size for size in _SIZES if size <= dims["layers"]]
        experts = [size for size in _SIZES if size <= self.model.expert_count] or [1]
        for tensor, pipeline, context in itertools.product(tensors, pipelines, _SIZES[:4]):
            if self.world % (tensor * pipeline * context):
                continue
            stage = self.world // pipeline
            virtuals = [
                size for size in _VIRTUAL if (size == 1 or pipeline > 1) and _spread(dims["layers"], pipeline, size)
            ]
            for virtual, expert, cut in itertools.product(virtuals, experts, (1, 2) if self.model.experts else (1,)):
                layout = ParallelConfig(tensor, pipeline, virtual, context, expert, cut, sequence=tensor > 1)
                if stage % (expert * cut) == 0 and cut <= tensor and not any(uncuttable(self.model, layout)):
                    yield layout

    def actors(self, parallel: ParallelConfig) -> Iterator[ActorConfig]:
        """Yields choices of what is computed again and of tokens per micro-batch; state stays on the GPU."""
        base, rollout = self.config.actor, self.config.rollout
        mixture = self.model.experts is not None
        layers = -(-self.model.dims["layers"] // (parallel.pipeline * parallel.virtual_pipeline))
        default = replace(
            base, parallel=parallel, offload=False, offload_weights=False, recompute="none", recompute_layers=None
        )
        longest = rollout.max_prompt_tokens + rollout.max_tokens
        lengths = sorted({longest, base.tokens_per_microbatch, *(size for size in _TOKENS if size > longest)})
        again = [
            default,
            replace(default, recompute="selective", recompute_modules=["moe" if mixture else "mlp"]),
            replace(default, recompute="full", recompute_layers=max(1, layers // 2)),
            replace(default, recompute="full"),
        ]
        if mixture:
            again.append(replace(default, recompute="selective", recompute_modules=["moe_act", "layernorm"]))
        precisions = [base.fp8] if base.fp8 is not None or not self.fp8 else [None, FP8Config()]
        for actor, tokens, fp8 in itertools.product(again, lengths, precisions):
            yield replace(actor, tokens_per_microbatch=tokens, fp8=fp8)

    def engines(self) -> Iterator[RolloutConfig]:
        """Engines within a node; before the recipe check."""
        base, node = self.config.rollout, self.machine.local_world_size or 1
        precisions = [base.fp8] if base.fp8 != "none" or not self.fp8 else ["none", "blockwise"]
        for tensor, expert, fp8 in itertools.product(_SIZES, (False, True), precisions):
            if tensor <= node and ((tensor > 1 and self.model.experts) or not expert):
                yield replace(
                    base, tensor_parallel=tensor, expert_parallel=expert, fp8="blockwise" if fp8 != "none" else "none"
                )

    def recipe(self, actor: ActorConfig, rollout: RolloutConfig) -> Config:
        """The recipe with these two sections; in FP8 with the correction that differing log-probs need."""
        algorithm = self.config.algorithm
        rounds = actor.fp8 is not None and self.config.actor.fp8 is None
        if rounds and algorithm.correction.weight == "none":
            algorithm = replace(algorithm, correction=replace(algorithm.correction, weight="token"))
        return replace(self.config, actor=actor, rollout=rollout, algorithm=algorithm)

    # ------------------------------------------------------------------------------------------------------ search
    def plan(self, config: Config) -> MemoryPlan:
        return make_plan(config, self.model, self.gpus, self.gpu_bytes)

    def fits(self, plan: MemoryPlan) -> bool:
        return max(map(plan.peak, PHASES)) + self.headroom <= self.gpu_bytes

    def layouts(self, predictor: Predictor) -> list[TimedLayout]:
        """Yields those whose weights and gradients fit, by the time that they would take without computing anything again."""
        made = (TimedLayout(self, predictor, parallel) for parallel in self.parallels())
        fit = [one for one in made if 6 * predictor.held(one.actors[0]).total + self.headroom <= self.gpu_bytes]
        return sorted(fit, key=lambda one: one.bound)

    def front(self, layouts: Iterable[TimedLayout]) -> list[ActorConfig]:
        """Actors whose update leaves the headroom and which no other trains faster while it keeps less on the GPU during
        generation. The plan and the recipe check are for those that may still be among the fastest."""
        best, fitting = float("inf"), []
        for layout in layouts:
            if layout.bound > _SLOWER * best:
                break
            for one in layout.fitting(self.gpu_bytes - self.headroom):
                fitting.append(one)
                best = min(best, one[0])
        fitting.sort(key=lambda one: one[:2])
        smallest, front = float("inf"), []
        for _, stays, actor in fitting:
            if stays < smallest and self.accepts(self.recipe(actor, self.config.rollout)):
                smallest = stays
                front.append(actor)
        return front

    def search(self, predictor: Predictor) -> list[Found]:
        """Layouts of which none is both faster and leaves more memory, the fastest first: the fastest with the headroom, with
        twice of it, four times, ..., as long as any fits."""
        layouts, fitting, free = self.layouts(predictor), list[Found](), self.headroom
        while front := (level := replace(self, headroom=free)).front(layouts):
            engines = [one for one in self.engines() if self.accepts(self.recipe(front[0], one))]
            fitting += [
                one for actor in front for engine in engines for one in level.with_engine(predictor, actor, engine)
            ]
            free = 2 * free or _LEAST
        return [one for one in pareto(fitting) if self.accepts(one.config)]

    def with_engine(self, predictor: Predictor, actor: ActorConfig, engine: RolloutConfig) -> Iterator[Found]:
        """Returns the layouts with the largest shares of the GPU for the engine."""
        least = self.plan(self.recipe(actor, replace(engine, memory_fraction=0.01)))
        own = least.bytes_of(Part.ENGINE_WEIGHTS, Part.ENGINE_WORKSPACE, Part.CACHE)
        share = math.floor((self.gpu_bytes - self.headroom - (least.peak(GENERATE) - own)) / self.gpu_bytes * 100)
        fitting = 0
        while share > 0 and fitting < _SHARES:
            config = self.recipe(actor, replace(engine, memory_fraction=share / 100))
            plan = self.plan(config)
            if plan.full_length_sequences < 1:
                return
            fits = self.fits(plan)
            if fits:
                yield Found(config, plan, predictor.of(config, plan))
            fitting += fits
            share -= _STEP if fits else 1


@dataclass(frozen=True)
class TimedLayout:
    """One of a space's layouts: its actors' times and plans, made once for all headrooms."""

    space: Space
    predictor: Predictor
    parallel: ParallelConfig

    @cached_property
    def actors(self) -> list[ActorConfig]:
        return list(self.space.actors(self.parallel))

    @cached_property
    def bound(self) -> float:
        """Seconds of training, at the least."""
        return min(self._seconds(actor) for actor in self.actors if actor.recompute == "none")

    @cached_property
    def _timed(self) -> list[tuple[float, int]]:
        return sorted((self._seconds(actor), number) for number, actor in enumerate(self.actors))

    @cached_property
    def _least(self) -> int:
        """The actor whose update takes least: everything computed again, of the shortest micro-batches."""
        again = {
            number: actor.tokens_per_microbatch
            for number, actor in enumerate(self.actors)
            if actor.recompute == "full" and actor.recompute_layers is None
        }
        return min(again, key=lambda number: again[number])

    @cached_property
    def _known(self) -> dict[tuple[int, bool, bool], MemoryPlan]:
        return {}

    def _seconds(self, actor: ActorConfig) -> float:
        config = self.space.recipe(actor, self.space.config.rollout)
        return self.predictor.training_seconds(config, self.space.world)

    def _offloaded(self, number: int, offload: bool, weights: bool) -> ActorConfig:
        return replace(self.actors[number], offload=offload, offload_weights=weights)

    def _plan(self, number: int, offload: bool = False, weights: bool = False) -> MemoryPlan:
        """The plan of an actor beside a small engine; its update takes as much whatever is offloaded."""
        if (number, offload, weights) not in self._known:
            engine = replace(self.space.config.rollout, memory_fraction=0.01)
            made = self.space.plan(self.space.recipe(self._offloaded(number, offload, weights), engine))
            self._known[number, offload, weights] = made
        return self._known[number, offload, weights]

    def fitting(self, room: float) -> Iterator[tuple[float, float, ActorConfig]]:
        """Returns in each precision the fastest actor whose update takes no more than `room`, with its state on the GPU
        throughout, and offloaded: seconds, and bytes on the GPU while a small engine generates."""
        if self._plan(self._least).peak(UPDATE) > room:
            return
        done: set[bool] = set()
        for seconds, number in self._timed:
            fp8 = self.actors[number].fp8 is not None
            if fp8 in done or self._plan(number).peak(UPDATE) > room:
                continue
            done.add(fp8)
            for kind in ((False, False), (True, False), (True, True)):
                yield seconds, self._plan(number, *kind).peak(GENERATE), self._offloaded(number, *kind)


def _spread(layers: int, pipeline: int, virtual: int) -> bool:
    """Whether the layers can be spread over the stages."""
    try:
        stage_layers(layers, pipeline, virtual)
    except ValueError:
        return False
    return True


def pareto(found: Iterable[Found]) -> list[Found]:
    """Returns those that no other one beats in both speed and headroom, the fastest first."""
    best: list[Found] = []
    for one in sorted(found, key=lambda one: (one.step.total, -one.headroom)):
        if not best or one.headroom > best[-1].headroom:
            best.append(one)
    return best
