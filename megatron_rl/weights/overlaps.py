"""The way of one kind of weight from the actor's ranks to the engines': who shares what, and whom each asks. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product, zip_longest
from typing import NamedTuple

import numpy as np

from megatron_rl.models.family import Model
from megatron_rl.models.rules import Rule
from megatron_rl.weights.layouts import ActorLayout, EngineLayout, Piece, unit_elements

_CUT_MULTIPLE = 128  # rows or columns: cuts between buckets keep blocks of FP8 scales whole


class Overlap(NamedTuple):
    """A box that a rank of an engine needs and one of the actor holds.

    Attributes:
        target: as a piece of the engine's parameter.
        at, expert: where it begins in the actor's parameter, and the local number of its first expert there.
    """

    target: Piece
    at: int
    expert: int

    def cut(self, part: int, parts: int) -> Overlap | None:
        """One of `parts` parts, nearly equal; None: it is empty. Experts are kept whole where there are enough."""
        piece = self.target
        experts, length = piece.last - piece.first, piece.stop - piece.start
        low, high, start, stop = 0, experts, 0, length
        if experts >= parts:
            low, high = experts * part // parts, experts * (part + 1) // parts
        else:
            low, part = divmod(part, parts // experts)
            high = low + 1
            start, stop = (_border(piece.start, length, end, parts // experts) for end in (part, part + 1))
        if low >= experts or start >= stop:
            return None
        span = (piece.start + start, piece.start + stop, piece.first + low, piece.first + high)
        target = piece.part(*span)
        return Overlap(target, self.at + start, self.expert + low)


def _border(start: int, length: int, part: int, parts: int) -> int:
    """Where a part of `length` positions from `start` on begins; at a multiple of the tensor's positions if they are many."""
    even = length * part // parts
    if part in (0, parts) or length < parts * _CUT_MULTIPLE:
        return even
    return min(length, -(-(start + even) // _CUT_MULTIPLE) * _CUT_MULTIPLE - start)


@dataclass(frozen=True, eq=False)
class Pairs:
    """Overlaps of a place in an engine and a cell of the actor, for a rule, in any layer; without those that share nothing.

    Attributes:
        unit: elements at one position of one expert.
        place, cell: int64 [pairs].
    """

    unit: int
    overlaps: tuple[tuple[Overlap, ...], ...]
    place: np.ndarray
    cell: np.ndarray
    _cut: dict[tuple[int, int], tuple[tuple[tuple[Overlap, ...], ...], np.ndarray]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Model, rule: Rule, actor: ActorLayout, engine: EngineLayout) -> Pairs:
        held = [actor.pieces(model, rule, cell) for cell in range(actor.cells(rule))]
        needed = [engine.pieces(model, rule, place) for place in range(engine.tensor)]
        overlaps = {}
        for place, cell in product(range(len(needed)), range(len(held))):
            both = [(want.within(own), own.within(want)) for want in needed[place] for own in held[cell]]
            if shared := tuple(Overlap(want, own.at, own.expert) for want, own in both if want and own):
                overlaps[place, cell] = shared
        places, cells = np.array(list(overlaps), int).T
        return cls(unit_elements(rule, model.dims), tuple(overlaps.values()), places, cells)

    def cut(self, part: int, parts: int) -> tuple[tuple[tuple[Overlap, ...], ...], np.ndarray]:
        """Overlaps of each pair in one of so many parts, and their elements: float64 [pairs]."""
        if (part, parts) not in self._cut:
            cuts = tuple(
                tuple(cut for overlap in shared if (cut := overlap.cut(part, parts))) for shared in self.overlaps
            )
            sizes = [float(self.unit * sum(overlap.target.size for overlap in shared)) for shared in cuts]
            self._cut[part, parts] = cuts, np.array(sizes)
        return self._cut[part, parts]


@dataclass(frozen=True, eq=False)
class Flow:
    """A rule's way from certain stages to all engines: which rank needs which pair (a row each), and who may send it.

    Attributes:
        target, pair: int64 [rows].
        own: bool [rows], whether the target holds the pair's cell itself.
        group: int64 [rows], the row of `candidates` from which its source is chosen.
        turn: int64 [rows], counts the rows of a group that are not `own`.
        candidates: int64 [groups, most]; -1 where a group has fewer.
        counts: int64 [groups].
    """

    pairs: Pairs
    target: np.ndarray
    pair: np.ndarray
    own: np.ndarray
    group: np.ndarray
    turn: np.ndarray
    candidates: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(
        cls, pairs: Pairs, rule: Rule, stages: Sequence[int], actor: ActorLayout, engine: EngineLayout, node: int
    ) -> Flow:
        """`node`: ranks of a machine. A rank that a machine shares with a holder asks that one, another asks any."""
        cells, ranks = actor.cells(rule), actor.stage_ranks
        of_engines = engine.ranks(actor)
        engines = len(of_engines) // engine.tensor
        target = (of_engines.start + np.arange(engines)[:, None] * engine.tensor + pairs.place).ravel()
        pair = np.tile(np.arange(len(pairs.place)), engines)
        cell = pairs.cell[pair]
        mine = np.isin(target // ranks, stages) & (target % ranks % cells == cell)
        groups = [
            np.concatenate([stage * ranks + np.arange(number, ranks, cells) for stage in stages])
            for number in range(cells)
        ]
        lookup = np.tile(np.arange(cells)[:, None], (1, -(-of_engines.stop // node)))
        for number in range(cells):
            for machine in np.unique(groups[number] // node).tolist():
                lookup[number, machine] = len(groups)
                groups.append(groups[number][groups[number] // node == machine])
        used, group = np.unique(lookup[cell, target // node], return_inverse=True)
        candidates = [groups[index] for index in used]
        padded = np.array(list(zip_longest(*candidates, fillvalue=-1))).T
        counts = np.array([len(found) for found in candidates])
        return cls(pairs, target, pair, mine, group, _turns(group, mine), padded, counts)

    def sources(self, load: np.ndarray) -> np.ndarray:
        """The source of every row, given what each rank sends already; int64 [rows].

        The targets of a group go to its candidates in turn, the least loaded first.
        """
        loads = np.where(self.candidates < 0, np.inf, load[self.candidates])
        order = np.take_along_axis(self.candidates, loads.argsort(axis=1, kind="stable"), axis=1)
        return np.where(self.own, self.target, order[self.group, self.turn % self.counts[self.group]])


def _turns(group: np.ndarray, own: np.ndarray) -> np.ndarray:
    """The number of each row among those of its group, `own` ones left out; int64 [rows]."""
    turn = np.zeros(len(group), int)
    rows = np.flatnonzero(~own)
    rows = rows[group[rows].argsort(kind="stable")]
    _, starts, counts = np.unique(group[rows], return_index=True, return_counts=True)
    turn[rows] = np.arange(len(rows)) - np.repeat(starts, counts)
    return turn
