"""Which engine draws which prompt's group: an even share of them at once, the rest to the engines that become free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_rl.data.sample import Sample
from megatron_rl.runtime.distributed import ProcessGrid


def longest_first(samples: Sequence[Sample], lengths: Mapping[str, float]) -> list[int]:
    """Places of the prompts whose responses will be the longest first, by the lengths of earlier ones (by sample id).

    A prompt without any counts as the mean of those that have some; equal ones stay in their order.
    """
    known = [lengths[sample.id] for sample in samples if sample.id in lengths]
    mean = sum(known) / len(known) if known else 0.0
    return sorted(range(len(samples)), key=lambda place: -lengths.get(samples[place].id, mean))


class Dispatcher:
    """Spreads prompts over the engines of a run. Every rank makes one, and begins the same rounds in the same order.

    Args:
        room: requests that an engine works on at a time.
    """

    def __init__(self, grid: ProcessGrid, room: int) -> None:
        self.grid, self._room, self._rounds = grid, room, 0

    def begin(self, order: Sequence[int], count: int, busy: int = 0) -> DispatchRound:
        """A round over prompts in this order, each of which is `count` requests. `busy`: an engine's other requests."""
        self._rounds += 1
        return DispatchRound(self.grid, str(self._rounds), order, self._room, count, busy)


class DispatchRound:
    """The prompts of one call of `generate`.

    Engine e begins with every E-th prompt of `order`, as many as it decodes at a time. What then is left is taken from a
    counter that all engines share, by the engine's leader, which tells its other ranks. Who draws what thus depends on
    time, and what is drawn does not: seeds belong to rollouts. A single engine has all from the start.
    """

    def __init__(
        self, grid: ProcessGrid, name: str, order: Sequence[int], room: int, count: int, busy: int = 0
    ) -> None:
        self._grid, self._name, self._order, self._room = grid, name, order, room
        at_once = -(-max(0, room - busy) // count)
        self._dispatched = len(order) if grid.engine.count == 1 else min(len(order), at_once * grid.engine.count)

    def first(self) -> list[int]:
        """The prompts that this rank's engine begins with."""
        return list(self._order[: self._dispatched][self._grid.engine.index :: self._grid.engine.count])

    def next(self, pending: int) -> int | None:
        """A further prompt for this rank's engine; None where it has no room beside its `pending` requests, or none is left.
        The ranks of an engine call it at the same points."""
        if self._dispatched >= len(self._order) or pending >= self._room:
            return None
        number = self._dispatched + self._grid.engine.broadcast(self._count() if self._grid.engine.is_leader else 0)
        if number < len(self._order):
            return self._order[number]
        self._dispatched = len(self._order)
        return None

    def _count(self) -> int:
        """How many were taken from the shared counter before."""
        assert self._grid.store is not None  # `distributed.initialize` has made the world of several engines
        return self._grid.store.add(f"{self._name}/next", 1) - 1
