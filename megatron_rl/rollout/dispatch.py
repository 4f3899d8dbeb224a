"""Which engine draws which prompt's group: an even share of them at once, the rest to the engines that become free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch.distributed as dist

from megatron_rl.data.sample import Sample
from megatron_rl.rollout.engine import Engine


def longest_first(samples: Sequence[Sample], lengths: Mapping[str, float]) -> list[int]:
    """Places of the prompts whose responses will be the longest first, by the lengths of earlier ones (by sample id).

    A prompt without any counts as the mean of those that have some; equal ones stay in their order.
    """
    known = [lengths[sample.id] for sample in samples if sample.id in lengths]
    mean = sum(known) / len(known) if known else 0.0
    return sorted(range(len(samples)), key=lambda place: -lengths.get(samples[place].id, mean))


class HandOut:
    """The prompts of one call of `generate`. Every rank makes one with the same arguments, in the same order of calls.

    Engine e begins with every E-th place of `order`, as many as it decodes at a time. What then is left is taken from a
    counter that all engines share, by the engine's first rank; its other ranks are told. Who draws what thus depends on
    time, and what is drawn does not: seeds belong to rollouts. A single engine has all from the start.
    """

    def __init__(self, engine: Engine, order: Sequence[int], count: int) -> None:
        self._engine, self._order = engine, order
        at_once = -(-engine.config.max_concurrent // count)
        self._given = len(order) if engine.engines == 1 else min(len(order), at_once * engine.engines)
        engine.handed_out += 1
        self._name, self._taken, self._told = str(engine.handed_out), 0, list[str]()

    def first(self) -> list[int]:
        """The places that this rank's engine begins with."""
        return list(self._order[: self._given][self._engine.index :: self._engine.engines])

    def more(self) -> Iterator[int]:
        """Further places, while the engine has room. Its ranks call it with the same queue."""
        while self._given < len(self._order) and self._engine.pending < self._engine.config.max_concurrent:
            number = self._given + self._next()
            if number >= len(self._order):
                self._given = len(self._order)
                return
            yield self._order[number]

    @property
    def _store(self) -> dist.Store:
        store = self._engine.grid.store
        assert store is not None  # `distributed.initialize` has made the world of several engines
        return store

    def _next(self) -> int:
        """The counter's next value, the same on every rank of the engine."""
        self._taken += 1
        told = f"{self._name}/{self._engine.index}/{self._taken}"
        if not self._engine.is_leader:
            return int(self._store.get(told))
        number = self._store.add(f"{self._name}/next", 1) - 1
        if self._engine.config.tensor_parallel > 1:
            self._store.set(told, str(number))
            self._told.append(told)
        return number

    def end(self) -> None:
        """Removes what the engine's first rank has told the others; after all of them have drawn everything."""
        for told in self._told:
            self._store.delete_key(told)
