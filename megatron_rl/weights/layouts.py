"""Which part of every weight each rank holds in the actor, and needs in the engine. No torch, no messages.

The unit is a box: positions [start, stop) along `Rule.dim` of one Hugging Face tensor; of experts, of the tensors of one
kind of experts [first, last) of a layer, stacked. The actor's layout cuts a rule into cells, one per tensor-parallel rank, of
experts one per expert- and expert-tensor-parallel rank; all ranks of a cell hold the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from megatron_rl.config.actor import ParallelConfig
from megatron_rl.config.pipeline_split import stage_numbers
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.models.family import Model
from megatron_rl.models.rules import Dims, Place, Rule, Sharding, Slice, shard_slices

ENGINE_VOCAB_MULTIPLE = 64  # vLLM's DEFAULT_VOCAB_PADDING_SIZE


class Piece(NamedTuple):
    """A box of a rule, in any layer, and where it lies in a rank's parameter.

    Attributes:
        tensor: index in `rule.hf`.
        start, stop: positions along `rule.dim` of that tensor.
        first, last: global numbers of the experts; 0 and 1 where the rule has none.
        at: position of `start` along the parameter's dimension.
        expert: local number of expert `first`.
        step: positions of the parameter from one of the tensor's to the next.
    """

    tensor: int
    start: int
    stop: int
    first: int
    last: int
    at: int
    expert: int
    step: int = 1

    def within(self, other: Piece) -> Piece | None:
        """The part that `other` has too, where this layout has it; None: there is none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        first, last = max(self.first, other.first), min(self.last, other.last)
        if self.tensor != other.tensor or start >= stop or first >= last:
            return None
        return self.part(start, stop, first, last)

    def part(self, start: int, stop: int, first: int, last: int) -> Piece:
        """These positions of it, of these experts."""
        at, expert = self.at + (start - self.start) * self.step, self.expert + first - self.first
        return Piece(self.tensor, start, stop, first, last, at, expert, self.step)

    @property
    def size(self) -> int:
        """Positions × experts."""
        return (self.stop - self.start) * (self.last - self.first)


def unit_elements(rule: Rule, dims: Dims) -> int:
    """Numbers at one position of one expert: the product of the tensor's other dimensions."""
    sizes = rule.hf[0].sizes(dims)
    return math.prod(sizes) // sizes[rule.dim]


def numbered(model: Model) -> list[tuple[int, Rule]]:
    """The rules that the model has weights for, with their indices in `family.rules`."""
    return [
        (index, rule)
        for index, rule in enumerate(model.family.rules)
        if not (rule.is_output and model.description.tied)
    ]


def layers_of(model: Model, rule: Rule) -> tuple[int, ...]:
    """The layers that have a rule's weight; -1 alone where it is in none."""
    return rule.layers_of(model.dims["layers"]) if rule.per_layer else (-1,)


def unplaced(model: Model) -> str | None:
    """The first weight of which the family does not say where vLLM keeps it; None: there is none, so a plan can be made."""
    return next((rule.hf[0].name for _, rule in numbered(model) if not rule.engine), None)


def _laid_out(slices: list[Slice], first: int, last: int) -> tuple[Piece, ...]:
    """Slices one after the other, of experts [first, last)."""
    ends = accumulate(piece.length for piece in slices)
    return tuple(
        Piece(piece.tensor, piece.start, piece.stop, first, last, end - piece.length, 0)
        for piece, end in zip(slices, ends, strict=True)
    )


def _in_engine(rule: Rule, dims: Dims, slices: list[Slice], first: int, last: int) -> tuple[Piece, ...]:
    """Slices as they lie in vLLM's parameters."""
    before, step = sum(dims[symbol] for symbol in rule.engine_after), rule.engine_step
    ends: dict[str | int, int] = {}
    laid_out = []
    for tensor, start, stop in ((piece.tensor, piece.start, piece.stop) for piece in slices):
        line = tensor if step > 1 else rule.engine[tensor]
        at = ends.get(line, tensor if step > 1 else before)
        laid_out.append(Piece(tensor, start, stop, first, last, at, 0, step))
        ends[line] = at + (stop - start) * step
    return tuple(laid_out)


@dataclass(frozen=True)
class ActorLayout:
    """Where Megatron-Core puts the weights. Ranks count along tensor, context, expert, data, pipeline, the last slowest;
    experts have a grid of their own in each stage: expert tensor, expert, copies.

    `layers`: global numbers of each stage's layers, in its order (virtual stages one after the other).
    """

    world: int
    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    layers: tuple[tuple[int, ...], ...] = ((),)

    @classmethod
    def of(cls, parallel: ParallelConfig, layers: int, world: int) -> ActorLayout:
        """A recipe's layout on `world` ranks."""
        stages = stage_numbers(layers, parallel.pipeline, parallel.virtual_pipeline)
        if world % (parallel.pipeline * parallel.tensor * parallel.context):
            raise ValueError(
                f"{world} ranks are no multiple of actor.parallel.tensor x pipeline x context "
                f"({parallel.tensor} x {parallel.pipeline} x {parallel.context})"
            )
        if world // parallel.pipeline % (parallel.expert * parallel.expert_tensor):
            raise ValueError(
                f"a stage's {world // parallel.pipeline} ranks are no multiple of actor.parallel.expert x expert_tensor "
                f"({parallel.expert} x {parallel.expert_tensor})"
            )
        return cls(world, parallel.tensor, parallel.expert, parallel.expert_tensor, stages)

    @property
    def stage_ranks(self) -> int:
        """Ranks of a pipeline stage."""
        return self.world // len(self.layers)

    def stages(self, model: Model, rule: Rule, layer: int) -> tuple[int, ...]:
        """The stages that hold a weight: one, or for a tied embedding also the last."""
        last = len(self.layers) - 1
        if rule.place is Place.EMBEDDING:
            shared = model.description.tied and rule.sharding is Sharding.VOCAB
            return (0, last) if shared and last else (0,)
        return (last,) if rule.place is Place.HEAD else (self._stage_of[layer],)

    @property
    def _stage_of(self) -> dict[int, int]:
        return _stage_of(self.layers)

    def cells(self, rule: Rule) -> int:
        if rule.per_expert:
            return self.expert * self.expert_tensor
        return self.tensor if rule.is_cut else 1

    def pieces(self, model: Model, rule: Rule, cell: int) -> tuple[Piece, ...]:
        """Slices that the ranks r of a stage with r % cells = cell have of a rule, in the order of their parameter."""
        if not rule.per_expert:
            return _laid_out(shard_slices(rule, model.dims, cell, self.cells(rule)), 0, 1)
        experts = model.expert_count
        if experts % self.expert:
            raise ValueError(f"num_experts = {experts} does not divide over {self.expert} expert-parallel ranks")
        first = cell // self.expert_tensor * (experts // self.expert)
        slices = shard_slices(rule, model.dims, cell % self.expert_tensor, self.expert_tensor)
        return _laid_out(slices, first, first + experts // self.expert)

    def held(self, model: Model, rank: int) -> Iterator[tuple[int, int, Piece]]:
        """(index of the rule, layer or -1, piece) for all that a rank holds; a tied output layer counts as the embedding."""
        stage, place = divmod(rank, self.stage_ranks)
        for index, rule in numbered(model):
            for layer in layers_of(model, rule):
                if stage in self.stages(model, rule, layer):
                    yield from ((index, layer, piece) for piece in self.pieces(model, rule, place % self.cells(rule)))


@cache
def _stage_of(layers: tuple[tuple[int, ...], ...]) -> dict[int, int]:
    return {layer: stage for stage, numbers in enumerate(layers) for layer in numbers}


@dataclass(frozen=True)
class EngineLayout:
    """Where vLLM 0.32 puts the weights (model_executor/layers: linear.py, vocab_parallel_embedding.py, fused_moe): engines of
    `tensor` consecutive ranks. `expert`: with `enable_expert_parallel`, whole experts per rank instead of a part of each.
    `generators`: ranks behind the actor's, which alone are engines; 0: the actor's are.
    """

    tensor: int = 1
    expert: bool = False
    generators: int = 0

    @classmethod
    def of(cls, rollout: RolloutConfig, generators: int = 0) -> EngineLayout:
        return cls(rollout.tensor_parallel, rollout.expert_parallel, generators)

    def ranks(self, actor: ActorLayout) -> range:
        """The ranks that are engines."""
        return range(actor.world, actor.world + self.generators) if self.generators else range(actor.world)

    def pieces(self, model: Model, rule: Rule, place: int) -> tuple[Piece, ...]:
        """Slices that the engine's rank `place` needs of a rule, in the order of its parameters."""
        if rule.per_expert and self.expert:
            first, last = self._experts(model, place)
            return _in_engine(rule, model.dims, shard_slices(rule, model.dims, 0, 1), first, last)
        slices = _engine_slices(rule, model, place, self.tensor) if self.brings(rule, place) else []
        return _in_engine(rule, model.dims, slices, 0, model.expert_count if rule.per_expert else 1)

    def brings(self, rule: Rule, place: int) -> bool:
        """Whether the engine's rank `place` has anything of a rule; its parameter is zero where it has not."""
        return place == 0 or not rule.engine_summed or (rule.per_expert and self.expert)

    def _experts(self, model: Model, place: int) -> tuple[int, int]:
        """vLLM's linear placement; it takes no remainder."""
        experts = model.expert_count
        if experts % self.tensor:
            raise ValueError(f"num_experts = {experts} does not divide over {self.tensor} ranks of an engine")
        each = experts // self.tensor
        return place * each, (place + 1) * each

    def shapes(self, model: Model, rule: Rule) -> dict[str, tuple[int, ...]]:
        """Returns by name the shape, on every rank, that a rule's tensors have in each of vLLM's parameters."""
        lengths = dict.fromkeys(rule.engine, 0)
        for piece in self.pieces(model, rule, 0):
            lengths[rule.engine[piece.tensor]] += piece.stop - piece.start
        experts = (model.expert_count // (self.tensor if self.expert else 1),) if rule.per_expert else ()
        shapes = {}
        for name, length in lengths.items():
            sizes = list(rule.hf[0].sizes(model.dims))
            sizes[rule.dim] = _padded_vocab(model.dims) // self.tensor if rule.sharding is Sharding.VOCAB else length
            shapes[name] = (*experts, *sizes)
        return shapes

    def parameters(self, model: Model) -> dict[str, tuple[int, ...]]:
        """vLLM's parameters by name, with their shapes; the same on every rank of an engine."""
        shapes: dict[str, tuple[int, ...]] = {}
        for _, rule in numbered(model):
            for pattern, shape in self.shapes(model, rule).items():
                for layer in layers_of(model, rule):
                    name = pattern.format(layer=layer)
                    shapes[name] = _stacked(shapes[name], shape, rule.dim) if name in shapes else shape
        return shapes

    def elements(self, model: Model, rank: int, itemsize: int) -> dict[str, int]:
        """Returns by name what vLLM's parameters take on a rank of the engine, in numbers of the model's dtype, of `itemsize`
        bytes; without the vocabulary's, which are padded."""
        elements, shapes = dict[str, int](), self.parameters(model)
        for _, rule in numbered(model):
            if rule.sharding is not Sharding.VOCAB:
                width = rule.width(itemsize) if self.brings(rule, rank) else 0
                names = (name.format(layer=layer) for layer in layers_of(model, rule) for name in rule.engine)
                elements |= {name: math.prod(shapes[name]) * width for name in names}
        return elements


def _stacked(first: tuple[int, ...], second: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """The shape of two tensors one after the other."""
    return (*first[:dim], first[dim] + second[dim], *first[dim + 1 :])


def _padded_vocab(dims: Dims) -> int:
    return -(-dims["vocab"] // ENGINE_VOCAB_MULTIPLE) * ENGINE_VOCAB_MULTIPLE


def _engine_slices(rule: Rule, model: Model, rank: int, tp: int) -> list[Slice]:
    """vLLM's cut of a rule: as Megatron's, but for the vocabulary's padding, and for what its attention reads."""
    if rule.sharding is Sharding.QKV:
        return model.attention.engine_slices(rank, tp)
    if rule.sharding is Sharding.VOCAB:
        return shard_slices(rule, {**model.dims, "padded_vocab": _padded_vocab(model.dims)}, rank, tp)
    return shard_slices(rule, model.dims, rank, tp)
