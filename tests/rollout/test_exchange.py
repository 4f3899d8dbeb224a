"""Rollouts change hands: each rank gets those that it needs, and nothing else, whatever the layout and the world."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from megatron_rl.rollout.exchange import ExchangeError, exchange, flatten, sizes_of, unflatten
from megatron_rl.runtime.peer_memory import Room
from tests import ranks

from . import exchanging


def test_every_rank_gets_what_it_needs_and_no_more_bytes_in_a_larger_world(tmp_path: Path) -> None:
    ranks.start(exchanging.in_world, exchanging.WORLD, str(tmp_path), exchanging.WORLD, 60, exchanging.everything)


def test_what_travels_of_a_rollout_is_its_own_whatever_lay_in_the_memory() -> None:
    """Ids, log-probs (0 of tokens that were not sampled) and marks of what follows the prompt, at their places."""
    rollouts, _ = exchanging.rollouts_of(0, 8, 0, 1, 1)
    sizes = sizes_of(rollouts)
    several = [row for row, rollout in rollouts.held.items() if len(rollout.segments) > 2]
    assert several
    for row in several:
        flats = [np.full(sizes[row], fill, dtype=np.uint8) for fill in (0, 255)]
        for flat in flats:
            flatten(rollouts, row, flat)
        segments = rollouts.held[row].segments[1:]
        size = sum(len(segment.ids) for segment in segments)
        np.testing.assert_array_equal(*(flat[: 9 * size] for flat in flats))
        log_probs = np.concatenate([np.zeros(len(s.ids)) if s.logprobs is None else s.logprobs for s in segments])
        np.testing.assert_array_equal(flats[1][4 * size : 8 * size].view(np.float32), log_probs.astype(np.float32))
        again = unflatten(rollouts, row, flats[1])
        np.testing.assert_array_equal(again.tokens, rollouts.held[row].tokens)


def test_a_rank_whose_memory_cannot_be_read_is_named() -> None:
    """The reading ends, the other ranks are not left waiting, and the message says whose rollouts are missing."""
    rollouts, _ = exchanging.rollouts_of(0, 4, 0, 2, 1)
    rows = [row for row in range(len(rollouts)) if rollouts.facts["source"][row] == 1]

    class Near:
        boards: ClassVar[dict[int, object]] = {1: None}
        reads = shows = Room()
        gone_on = 0

        def show(self, addresses: np.ndarray) -> None:
            assert addresses.tolist() == [0]

        def shown(self, source: int, count: int) -> np.ndarray:
            return np.array([7])

        def read(self, source: int, address: int, whole: np.ndarray) -> None:
            assert (source, address) == (1, 7)
            raise PermissionError(1, "Operation not permitted")

        def go_on(self) -> None:
            self.gone_on += 1

    near = Near()
    grid: Any = SimpleNamespace(rank=0, world=2, near=near, barrier=lambda: None, host_group=None)
    first = rollouts.sample(rows[0]).id
    with pytest.raises(
        ExchangeError, match=rf"rank 1 did not hand over {len(rows)} rollouts from rollout 0 of {first} on"
    ):
        exchange(grid, rollouts, [([0], rows)])
    assert near.gone_on == 1


def test_memory_is_taken_again_when_nothing_views_it() -> None:
    room = Room()
    taken = room.take(64)
    kept = taken[8:24].view(np.int32)[1:]
    del taken
    assert not np.shares_memory(room.take(32), kept)
    place = room.take(32).ctypes.data
    assert [room.take(size).ctypes.data for size in (32, 16)] == [place, place]


@pytest.mark.parametrize("of_one_host", ["", "near"])
@pytest.mark.parametrize("hangs", ["", "hangs"])
def test_a_rank_that_does_not_hand_over_is_named_within_the_deadline(
    tmp_path: Path, hangs: str, of_one_host: str
) -> None:
    for flag in filter(None, (hangs, of_one_host)):
        (tmp_path / flag).touch()
    ranks.start(exchanging.in_world, 3, str(tmp_path), 3, 2, exchanging.one_is_missing)
    for rank in (0, 1):
        seconds, _, said = (tmp_path / f"said_{rank}").read_text().partition(" ")
        assert said.startswith("rank 2 did not"), said
        assert float(seconds) < 8
