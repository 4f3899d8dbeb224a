"""The resharding plan: who sends which part of which weight to whom, so that each engine rank gets its slice and no more.

A pure function of the layouts: every rank computes it alone and finds the same. What a rank holds itself it copies; anything
else comes from a rank of the same node that holds it, or from the least loaded of all that do. The weights are walked through
one layer of every pipeline stage at a time, so that all stages send at once; buckets are consecutive parts of that walk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from megatron_rl.models.family import Model
from megatron_rl.models.rules import Place
from megatron_rl.weights.layouts import ActorLayout, EngineLayout, numbered, unplaced
from megatron_rl.weights.overlaps import Flow, Overlap, Pairs

BUCKET_BYTES = 256 * 2**20


class Box(NamedTuple):
    """Positions [start, stop) along `Rule.dim` of a Hugging Face tensor, of experts [first, last).

    Attributes:
        rule: index in `model.family.rules`.
        layer: global number; -1: in none.
        tensor: index in the rule's `hf`.
        first, last: global numbers of the experts, whose tensors are stacked; 0 and 1 where the rule has none.
    """

    rule: int
    layer: int
    tensor: int
    start: int
    stop: int
    first: int
    last: int

    def shape(self, model: Model, itemsize: int) -> tuple[int, ...]:
        """[experts, ...] of experts, else the tensor's own; in numbers of the model's dtype, of `itemsize` bytes."""
        rule = model.family.rules[self.rule]
        sizes = list(rule.hf[self.tensor].sizes(model.dims))
        sizes[rule.dim] = (self.stop - self.start) * rule.width(itemsize)
        return (self.last - self.first, *sizes) if rule.per_expert else tuple(sizes)


class Move(NamedTuple):
    """A box on its way from a rank of the actor into a rank of an engine (which may be the same rank).

    Attributes:
        source_rule: index of the rule whose parameter the source takes it from: the box's, or that of the tied output layer.
        source_at: where it begins in that parameter, along `Rule.dim`.
        source_expert: local number of its first expert there; 0 without experts.
        target_at: where it begins in vLLM's parameter, along `Rule.dim` (of experts: `Rule.dim` + 1, after the expert's), in
            steps of `Rule.engine_step`.
        target_expert: number of its first expert in vLLM's parameter.
    """

    box: Box
    source_rule: int
    source_at: int
    source_expert: int
    target_at: int
    target_expert: int


@dataclass(frozen=True)
class Bucket:
    """One rank's part of a bucket. A message is one rank's boxes for another, each contiguous (`Box.shape`), end to end in
    this order.

    Attributes:
        sends: by target rank, in ascending order.
        receives: by source rank, in ascending order.
        copies: what this rank holds and needs itself.
        finished: vLLM's parameters that are whole on this rank once this bucket has been written.
    """

    sends: dict[int, list[Move]]
    receives: dict[int, list[Move]]
    copies: list[Move]
    finished: tuple[str, ...]


@dataclass(frozen=True)
class RankPlan:
    """All buckets of one rank, and the parameters that they fill: vLLM's names and shapes; none where no engine is."""

    rank: int
    buckets: tuple[Bucket, ...]
    parameters: dict[str, tuple[int, ...]]


class _Shipment(NamedTuple):
    """One part of a weight, with the source of every row of its flow (int32 [rows])."""

    flow: Flow
    rule: int
    layer: int
    part: int
    parts: int
    sources: np.ndarray

    @property
    def overlaps(self) -> tuple[tuple[Overlap, ...], ...]:
        """The overlaps by pair of the flow."""
        return self.flow.pairs.cut(self.part, self.parts)[0]

    @property
    def moved(self) -> np.ndarray:
        """Elements that each row brings from another rank; float64 [rows]."""
        return np.where(self.flow.own, 0.0, self.flow.pairs.cut(self.part, self.parts)[1][self.flow.pair])


class SyncTraffic(NamedTuple):
    """Elements that each rank sends to others and receives from them; float64 [world]."""

    sent: np.ndarray
    received: np.ndarray

    @classmethod
    def of(cls, shipments: Iterable[_Shipment], world: int) -> SyncTraffic:
        sent, received = np.zeros(world), np.zeros(world)
        for shipment in shipments:
            sizes = shipment.moved
            sent += np.bincount(shipment.sources, sizes, world)
            received += np.bincount(shipment.flow.target, sizes, world)
        return cls(sent, received)

    def plus(self, other: SyncTraffic) -> SyncTraffic:
        return SyncTraffic(self.sent + other.sent, self.received + other.received)

    @property
    def largest(self) -> float:
        return float(max(self.sent.max(), self.received.max()))


@dataclass(frozen=True)
class Plan:
    """All buckets of all ranks."""

    model: Model
    actor: ActorLayout
    engine: EngineLayout
    buckets: tuple[tuple[_Shipment, ...], ...]

    def of(self, rank: int) -> RankPlan:
        """One rank's part of it."""
        last = {
            name.format(layer=ship.layer): number
            for number, ships in enumerate(self.buckets)
            for ship in ships
            for name in self.model.family.rules[ship.rule].engine
        }
        finished: list[list[str]] = [[] for _ in self.buckets]
        parameters = self.engine.parameters(self.model) if rank in self.engine.ranks(self.actor) else {}
        for name, number in last.items() if parameters else ():
            finished[number].append(name)
        buckets = tuple(
            self._bucket(rank, ships, tuple(names)) for ships, names in zip(self.buckets, finished, strict=True)
        )
        return RankPlan(rank, buckets, parameters)

    def _bucket(self, rank: int, shipments: Sequence[_Shipment], finished: tuple[str, ...]) -> Bucket:
        sends: dict[int, list[Move]] = {}
        receives: dict[int, list[Move]] = {}
        copies: list[Move] = []
        for ship in shipments:
            for row in np.flatnonzero((ship.sources == rank) | (ship.flow.target == rank)).tolist():
                source, target = int(ship.sources[row]), int(ship.flow.target[row])
                moves = list(self._moves(ship, row, source))
                if source == target:
                    copies += moves
                elif moves:
                    (sends if source == rank else receives).setdefault(target if source == rank else source, []).extend(
                        moves
                    )
        return Bucket(dict(sorted(sends.items())), dict(sorted(receives.items())), copies, finished)

    def _moves(self, ship: _Shipment, row: int, source: int) -> Iterator[Move]:
        rules = self.model.family.rules
        rule = ship.rule
        if rules[rule].place is Place.EMBEDDING and source // self.actor.stage_ranks > 0:
            rule = rules.index(self.model.family.output)
        for needed, at, expert in ship.overlaps[ship.flow.pair[row]]:
            box = Box(ship.rule, ship.layer, *needed[:5])
            yield Move(box, rule, at, expert, needed.at, needed.expert)

    def traffic(self) -> Iterator[SyncTraffic]:
        """Traffic of each bucket."""
        return (SyncTraffic.of(shipments, self.world) for shipments in self.buckets)

    @property
    def world(self) -> int:
        """Ranks that send or receive."""
        return self.engine.ranks(self.actor).stop


def make_plan(
    model: Model,
    actor: ActorLayout,
    engine: EngineLayout,
    *,
    bucket_elements: int,
    node: int,
) -> Plan:
    """The plan for a model from the actor's layout into the engines'.

    Args:
        bucket_elements: the most that a rank sends, and receives, in one bucket (one position of a tensor at least).
        node: ranks of a machine.

    Raises:
        ValueError: a layout does not fit the model or the ranks, or the family does not say what vLLM calls a weight.
    """
    of_engines = engine.ranks(actor)
    if len(of_engines) % engine.tensor:
        raise ValueError(f"{len(of_engines)} ranks are no multiple of rollout.tensor_parallel = {engine.tensor}")
    if unknown := unplaced(model):
        raise ValueError(f"family `{model.family.name}` does not say where vLLM keeps {unknown}")
    pairs = {index: Pairs.of(model, rule, actor, engine) for index, rule in numbered(model)}
    flows: dict[tuple[int, tuple[int, ...]], Flow] = {}
    load = np.zeros(of_engines.stop)
    buckets: list[list[_Shipment]] = [[]]
    filled = SyncTraffic.of((), of_engines.stop)

    def flow(index: int, layer: int) -> Flow:
        rule = model.family.rules[index]
        key = index, actor.stages(model, rule, layer)
        if key not in flows:
            flows[key] = Flow.of(pairs[index], rule, key[1], actor, engine, node)
        return flows[key]

    for weights in _walk(model, actor):
        flown = [(flow(index, layer), index, layer) for index, layer in weights]
        for shipments, traffic in _parts(flown, load, bucket_elements):
            load += traffic.sent
            filled = filled.plus(traffic)
            if buckets[-1] and filled.largest > bucket_elements:
                buckets.append([])
                filled = traffic
            buckets[-1].extend(shipments)
    return Plan(model, actor, engine, tuple(tuple(bucket) for bucket in buckets))


def _walk(model: Model, actor: ActorLayout) -> Iterator[list[tuple[int, int]]]:
    """(rule, layer) of all weights: those in no layer, then rule by rule the first layer of every stage, the second, ..."""
    rules = numbered(model)
    yield [(index, -1) for index, rule in rules if not rule.per_layer]
    for row in zip_longest(*actor.layers):
        for index, rule in rules:
            if weights := [(index, layer) for layer in row if layer is not None and rule.is_in(layer)]:
                yield weights


def _parts(
    flown: Sequence[tuple[Flow, int, int]], load: np.ndarray, limit: int
) -> list[tuple[list[_Shipment], SyncTraffic]]:
    """Weights cut into parts in which no rank sends or receives more than `limit`; `load`: what each rank sends before."""
    positions = max(overlap.target.size for flow, _, _ in flown for shared in flow.pairs.overlaps for overlap in shared)
    parts = 1
    while True:
        sent, shipped = load, []
        for part in range(parts):
            shipments = [
                _Shipment(flow, index, layer, part, parts, flow.sources(sent).astype(np.int32))
                for flow, index, layer in flown
            ]
            traffic = SyncTraffic.of(shipments, len(load))
            sent = sent + traffic.sent
            shipped.append((shipments, traffic))
        largest = max(traffic.largest for _, traffic in shipped)
        if largest <= limit or parts >= positions:
            return shipped
        parts = min(positions, max(parts + 1, int(largest * parts // limit)))
