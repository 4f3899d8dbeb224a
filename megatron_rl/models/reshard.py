"""The resharding plan: who sends which part of which weight to whom, so that each engine rank gets its slice and no more.

A pure function of the layouts: every rank computes it alone and finds the same. What a rank holds itself it copies; anything
else comes from a rank of the same node that holds it, or from the least loaded of all that do. The weights are walked through
one layer of every pipeline stage at a time, so that all stages send at once; buckets are consecutive parts of that walk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product, zip_longest
from typing import NamedTuple

import numpy as np

from megatron_rl.models.family import Model
from megatron_rl.models.placement import ActorLayout, EngineLayout, Piece, numbered, unit_elements, unplaced
from megatron_rl.models.rules import Place, Rule

BUCKET_BYTES = 256 * 2**20
_CUT_MULTIPLE = 128  # rows or columns: cuts between buckets keep blocks of FP8 scales whole


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

    def shape(self, model: Model) -> tuple[int, ...]:
        """[experts, ...] of experts, else the tensor's own dimensions."""
        rule = model.family.rules[self.rule]
        sizes = list(rule.hf[self.tensor].sizes(model.dims))
        sizes[rule.dim] = self.stop - self.start
        return (self.last - self.first, *sizes) if rule.per_expert else tuple(sizes)


class Move(NamedTuple):
    """A box on its way from a rank of the actor into a rank of an engine (which may be the same rank).

    Attributes:
        source_rule: index of the rule whose parameter the source takes it from: the box's, or that of the tied output layer.
        source_at: where it begins in that parameter, along `Rule.dim`.
        source_expert: local number of its first expert there; 0 without experts.
        target_at: where it begins in vLLM's parameter, along `Rule.dim` (of experts: `Rule.dim` + 1, after the expert's).
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
    """All buckets of one rank, and the parameters that they fill: vLLM's names and shapes."""

    rank: int
    buckets: tuple[Bucket, ...]
    parameters: dict[str, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class _Flow:
    """One rule's way from certain stages to all engines: which target needs which cell (a row each), and who may send it.

    Attributes:
        unit: elements at one position of one expert.
        pairs: of each (place in an engine, cell of the actor) that overlap: what they share, as pieces of the source's and of
            the target's parameter.
        target, pair: int64 [rows].
        own: bool [rows], whether the target holds the cell itself.
        group: int64 [rows], the row of `candidates` from which its source is chosen.
        turn: int64 [rows], counts the rows of a group that are not `own`.
        candidates: int64 [groups, most]; -1 where a group has fewer.
        counts: int64 [groups].
    """

    unit: int
    pairs: tuple[tuple[tuple[Piece, Piece], ...], ...]
    target: np.ndarray
    pair: np.ndarray
    own: np.ndarray
    group: np.ndarray
    turn: np.ndarray
    candidates: np.ndarray
    counts: np.ndarray
    _sizes: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def sizes(self, part: int, parts: int) -> np.ndarray:
        """Elements of each row in one of so many parts; int64 [rows]."""
        if (part, parts) not in self._sizes:
            cuts = ([cut_piece(piece, part, parts) for _, piece in pieces] for pieces in self.pairs)
            each = [self.unit * sum(cut.size for cut in found if cut) for found in cuts]
            self._sizes[part, parts] = np.array(each, np.int64)[self.pair]
        return self._sizes[part, parts]

    def sources(self, load: np.ndarray) -> np.ndarray:
        """The source of every row, given what each rank sends already; int32 [rows].

        The targets of a group go to its candidates in turn, the least loaded first.
        """
        loads = np.where(self.candidates < 0, np.inf, load[self.candidates])
        order = np.take_along_axis(self.candidates, loads.argsort(axis=1, kind="stable"), axis=1)
        return np.where(self.own, self.target, order[self.group, self.turn % self.counts[self.group]])


def _flow(
    model: Model, rule: Rule, stages: Sequence[int], actor: ActorLayout, engine: EngineLayout, node: int
) -> _Flow:
    """`node`: ranks of a machine."""
    cells, ranks = actor.cells(rule), actor.stage_ranks
    held = [actor.pieces(model, rule, cell) for cell in range(cells)]
    needed = [engine.pieces(model, rule, place) for place in range(engine.tensor)]
    pairs, places, parts_of = [], [], []
    for place, number in product(range(engine.tensor), range(cells)):
        both = [(own.within(want), want.within(own)) for want in needed[place] for own in held[number]]
        if overlaps := tuple((source, target) for source, target in both if source and target):
            pairs.append(overlaps)
            places.append(place)
            parts_of.append(number)
    engines = actor.world // engine.tensor
    target = (np.arange(engines)[:, None] * engine.tensor + np.array(places, int)).ravel()
    pair = np.tile(np.arange(len(pairs)), engines)
    cell = np.array(parts_of, int)[pair]
    own = np.isin(target // ranks, stages) & (target % ranks % cells == cell)
    holders = [
        np.concatenate([stage * ranks + np.arange(number, ranks, cells) for stage in stages]) for number in range(cells)
    ]
    near = {
        (number, machine): found[found // node == machine]
        for number, found in enumerate(holders)
        for machine in np.unique(found // node).tolist()
    }
    lookup = np.tile(np.arange(cells)[:, None], (1, -(-actor.world // node)))
    for index, (number, machine) in enumerate(near):
        lookup[number, machine] = cells + index
    groups = [*holders, *near.values()]
    group = lookup[cell, target // node]
    return _Flow(
        unit_elements(rule, model.dims),
        tuple(pairs),
        target,
        pair,
        own,
        group,
        _turns(group, own),
        np.array(list(zip_longest(*groups, fillvalue=-1))).T,
        np.array([len(found) for found in groups]),
    )


def _turns(group: np.ndarray, own: np.ndarray) -> np.ndarray:
    """The number of each row among those of its group, `own` ones left out; int64 [rows]."""
    turn = np.zeros(len(group), int)
    rows = np.flatnonzero(~own)
    rows = rows[group[rows].argsort(kind="stable")]
    _, starts, counts = np.unique(group[rows], return_index=True, return_counts=True)
    turn[rows] = np.arange(len(rows)) - np.repeat(starts, counts)
    return turn


def cut_piece(piece: Piece, part: int, parts: int) -> Piece | None:
    """One of `parts` nearly equal parts of a piece; None: it is empty. Experts are kept whole where there are enough."""
    experts, length = piece.last - piece.first, piece.stop - piece.start
    if experts >= parts:
        low, high = (experts * number // parts for number in (part, part + 1))
        return piece._replace(first=piece.first + low, last=piece.first + high, expert=piece.expert + low)
    multiple = _CUT_MULTIPLE if length >= parts * _CUT_MULTIPLE else 1
    # Borders lie at multiples of the tensor's positions, not of the piece's.
    borders = (-(-(piece.start + length * number // parts) // multiple) * multiple for number in (part, part + 1))
    low, high = (
        length * number // parts if number in (0, parts) else min(length, border - piece.start)
        for number, border in zip((part, part + 1), borders, strict=True)
    )
    return piece._replace(start=piece.start + low, stop=piece.start + high, at=piece.at + low) if low < high else None


class _Shipment(NamedTuple):
    """One part of a weight, with the source of every row of its flow (int32 [rows])."""

    flow: _Flow
    rule: int
    layer: int
    part: int
    parts: int
    sources: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        return self.flow.sizes(self.part, self.parts)


class Traffic(NamedTuple):
    """Elements that each rank sends to others and receives from them; float64 [world]."""

    sent: np.ndarray
    received: np.ndarray

    @classmethod
    def of(cls, shipments: Sequence[_Shipment], world: int) -> Traffic:
        sent, received = np.zeros(world), np.zeros(world)
        for shipment in shipments:
            sizes = np.where(shipment.flow.own, 0, shipment.sizes)
            sent += np.bincount(shipment.sources, sizes, world)
            received += np.bincount(shipment.flow.target, sizes, world)
        return cls(sent, received)

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
        last = {(ship.rule, ship.layer): number for number, ships in enumerate(self.buckets) for ship in ships}
        finished: list[list[str]] = [[] for _ in self.buckets]
        for (rule, layer), number in last.items():
            finished[number].append(self.model.family.rules[rule].engine.format(layer=layer))
        buckets = tuple(
            self._bucket(rank, ships, tuple(names)) for ships, names in zip(self.buckets, finished, strict=True)
        )
        return RankPlan(rank, buckets, self.engine.parameters(self.model))

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
        for held, needed in ship.flow.pairs[ship.flow.pair[row]]:
            mine, theirs = (cut_piece(piece, ship.part, ship.parts) for piece in (held, needed))
            if mine and theirs:
                box = Box(ship.rule, ship.layer, *theirs[:5])
                yield Move(box, rule, mine.at, mine.expert, theirs.at, theirs.expert)

    def traffic(self) -> Iterator[Traffic]:
        """Of each bucket."""
        return (Traffic.of(shipments, self.actor.world) for shipments in self.buckets)


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
    if actor.world % engine.tensor:
        raise ValueError(f"{actor.world} ranks are no multiple of rollout.tensor_parallel = {engine.tensor}")
    if unknown := unplaced(model):
        raise ValueError(f"family `{model.family.name}` does not say where vLLM keeps {unknown}")
    flows: dict[tuple[int, tuple[int, ...]], _Flow] = {}
    load = np.zeros(actor.world)
    buckets: list[list[_Shipment]] = [[]]
    filled = Traffic.of((), actor.world)

    def flow(index: int, layer: int) -> _Flow:
        rule = model.family.rules[index]
        key = index, actor.stages(model, rule, layer)
        if key not in flows:
            flows[key] = _flow(model, rule, key[1], actor, engine, node)
        return flows[key]

    for weights in _walk(model, actor):
        flown = [(flow(index, layer), index, layer) for index, layer in weights]
        for shipments in _parts(flown, load, bucket_elements):
            traffic = Traffic.of(shipments, actor.world)
            both = Traffic(filled.sent + traffic.sent, filled.received + traffic.received)
            if buckets[-1] and both.largest > bucket_elements:
                buckets.append([])
                both = traffic
            buckets[-1].extend(shipments)
            filled = both
    return Plan(model, actor, engine, tuple(tuple(bucket) for bucket in buckets))


def _walk(model: Model, actor: ActorLayout) -> Iterator[list[tuple[int, int]]]:
    """(rule, layer) of all weights: those in no layer, then rule by rule the first layer of every stage, the second, ..."""
    rules = numbered(model)
    yield [(index, -1) for index, rule in rules if not rule.per_layer]
    for row in zip_longest(*actor.layers):
        for index, rule in rules:
            if rule.per_layer:
                yield [(index, layer) for layer in row if layer is not None]


def _parts(flown: Sequence[tuple[_Flow, int, int]], load: np.ndarray, limit: int) -> list[list[_Shipment]]:
    """Weights cut into parts in which no rank sends or receives more than `limit`; `load` grows by what is sent."""
    positions = max(piece.size for flow, _, _ in flown for pieces in flow.pairs for _, piece in pieces)
    parts, largest = 0, np.inf
    while largest > limit and parts < positions:
        parts = 1 if not parts else max(parts + 1, min(positions, int(largest * parts // limit)))
        after, found = load.copy(), []
        for part in range(parts):
            shipments = [
                _Shipment(flow, index, layer, part, parts, flow.sources(after).astype(np.int32))
                for flow, index, layer in flown
            ]
            found.append(shipments)
            after += Traffic.of(shipments, len(load)).sent
        largest = max(Traffic.of(shipments, len(load)).largest for shipments in found)
    load[:] = after
    return found
