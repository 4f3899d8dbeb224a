"""Prompts over engines that are not equally fast: each is drawn once, by all ranks of one engine, the longest first."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_rl.data.sample import Sample
from megatron_rl.rollout.dispatch import HandOut, longest_first

COUNT, AT_ONCE = 2, 4  # rollouts of a prompt; sequences of an engine
SLOW = 0.02  # seconds of a response


def samples(number: int) -> list[Sample]:
    return [Sample(str(i), "t", "", [1]) for i in range(number)]


def test_prompts_with_long_responses_come_first_and_unknown_ones_count_as_the_mean() -> None:
    assert longest_first(samples(4), {}) == [0, 1, 2, 3]
    assert longest_first(samples(5), {"1": 10.0, "3": 2.0, "4": 8.0, "other": 99.0}) == [1, 4, 0, 2, 3]


def draw(engine: Any, order: list[int], taken: list[int], slow: bool) -> None:
    """One rank: ends a response of its queue at a time."""
    for _ in range(2):  # calls of `generate`
        taken.clear()
        hand_out = HandOut(engine, order, COUNT)

        def submit(places: Any) -> None:
            for place in places:
                taken.append(place)
                engine.pending += COUNT

        submit(hand_out.first())
        while engine.pending:
            time.sleep(SLOW if slow else SLOW / 10)
            engine.pending -= 1
            submit(hand_out.more())
        engine.everyone.wait()
        hand_out.end()


@pytest.mark.parametrize("size", [1, 2])
def test_an_engine_that_is_free_takes_the_next_prompt(size: int) -> None:
    order, world = list(range(20))[::-1], 3 * size
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=10))
    everyone = threading.Barrier(world)
    taken: list[list[int]] = [[] for _ in range(world)]
    threads = []
    for rank in range(world):
        engine = SimpleNamespace(
            config=SimpleNamespace(tensor_parallel=size, max_concurrent=AT_ONCE),
            grid=SimpleNamespace(rank=rank, store=store),
            index=rank // size,
            engines=3,
            is_leader=rank % size == 0,
            handed_out=0,
            pending=0,
            everyone=everyone,
        )
        threads.append(threading.Thread(target=draw, args=(engine, order, taken[rank], rank // size == 0)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    leaders = taken[::size]
    assert sorted(place for own in leaders for place in own) == sorted(order)
    assert [own[:2] for own in leaders] == [[19, 16], [18, 15], [17, 14]], "an even share of the longest at once"
    assert all(own == sorted(own, reverse=True) for own in leaders)
    assert len(leaders[0]) < min(len(leaders[1]), len(leaders[2])), "the slow engine has the fewest"
    for first in range(0, world, size):
        assert taken[first : first + size] == [taken[first]] * size, "an engine's ranks have the same"
    assert store.num_keys() <= 2, "only the counters of the calls are left"


def test_what_fits_at_once_or_one_engine_has_needs_no_counter() -> None:
    config, grid = SimpleNamespace(tensor_parallel=1, max_concurrent=AT_ONCE), SimpleNamespace(rank=1, store=None)
    for engines, number in ((3, 6), (1, 20)):
        engine: Any = SimpleNamespace(config=config, grid=grid, index=0, engines=engines, handed_out=0, pending=0)
        hand_out = HandOut(engine, list(range(number)), COUNT)
        assert hand_out.first() == list(range(number))[::engines]
        assert list(hand_out.more()) == []
