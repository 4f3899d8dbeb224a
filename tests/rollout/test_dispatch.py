"""Prompts over engines that are not equally fast: each is drawn once, by all ranks of one engine, the longest first."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from megatron_rl.data.sample import Sample
from megatron_rl.rollout.dispatch import Dispatcher, longest_first
from megatron_rl.runtime.distributed import ALONE, EngineGroup

COUNT, AT_ONCE = 2, 4  # rollouts of a prompt; sequences of an engine
SLOW = 0.02  # seconds of a response


def samples(number: int) -> list[Sample]:
    return [Sample(str(i), "t", "", [1]) for i in range(number)]


def test_prompts_with_long_responses_come_first_and_unknown_ones_count_as_the_mean() -> None:
    assert longest_first(samples(4), {}) == [0, 1, 2, 3]
    assert longest_first(samples(5), {"1": 10.0, "3": 2.0, "4": 8.0, "other": 99.0}) == [1, 4, 0, 2, 3]


class Engine:
    """A thread's part of an engine of several: which it is, and the leader's items for its other threads."""

    def __init__(self, rank: int, size: int, count: int, items: list[Any], together: threading.Barrier) -> None:
        self.index, self.count, self.size, self.rank = rank // size, count, size, rank % size
        self.is_leader = self.rank == 0
        self._items, self._together = items, together

    def broadcast(self, item: int) -> int:
        if self.is_leader:
            self._items[0] = item
        self._together.wait(10)
        item = self._items[0]
        self._together.wait(10)
        return item


def draw(dispatcher: Dispatcher, order: list[int], taken: list[int], slow: bool, everyone: threading.Barrier) -> None:
    """One rank: ends a response of its queue at a time."""
    for _ in range(2):  # calls of `generate`
        taken.clear()
        dispatch = dispatcher.begin(order, COUNT)
        taken += dispatch.first()
        pending = COUNT * len(taken)
        while pending:
            time.sleep(SLOW if slow else SLOW / 10)
            pending -= 1
            while (prompt := dispatch.next(pending)) is not None:
                taken.append(prompt)
                pending += COUNT
        everyone.wait()


@pytest.mark.parametrize("size", [1, 2])
def test_an_engine_that_is_free_takes_the_next_prompt(size: int) -> None:
    order, world = list(range(20))[::-1], 3 * size
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=10))
    everyone = threading.Barrier(world)
    taken: list[list[int]] = [[] for _ in range(world)]
    shared: list[tuple[list[Any], threading.Barrier]] = [([None], threading.Barrier(size)) for _ in range(3)]
    threads = []
    for rank in range(world):
        engine: Any = Engine(rank, size, 3, *shared[rank // size])
        dispatcher = Dispatcher(replace(ALONE, rank=rank, world=world, store=store, engine=engine), AT_ONCE)
        arguments = (dispatcher, order, taken[rank], rank // size == 0, everyone)
        threads.append(threading.Thread(target=draw, args=arguments))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    leaders = taken[::size]
    assert sorted(prompt for prompts in leaders for prompt in prompts) == sorted(order)
    assert [prompts[:2] for prompts in leaders] == [[19, 16], [18, 15], [17, 14]], (
        "an even share of the longest at once"
    )
    assert all(prompts == sorted(prompts, reverse=True) for prompts in leaders)
    assert len(leaders[0]) < min(len(leaders[1]), len(leaders[2])), "the slow engine has the fewest"
    for first in range(0, world, size):
        assert taken[first : first + size] == [taken[first]] * size, "an engine's ranks have the same"
    assert store.num_keys() <= 2, "only the counters of the calls are left"


def test_what_fits_at_once_or_one_engine_has_needs_no_counter() -> None:
    for engines, number in ((3, 6), (1, 20)):
        dispatch = Dispatcher(replace(ALONE, engine=EngineGroup(count=engines)), AT_ONCE).begin(
            list(range(number)), COUNT
        )
        assert dispatch.first() == list(range(number))[::engines]
        assert dispatch.next(0) is None
