"""Rollouts change hands: each rank gets those that it needs, and nothing else, whatever the layout and the world."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.rollout.exchange import ExchangeError, flatten, sizes_of, unflatten
from tests import ranks

from . import exchanging


def test_every_rank_gets_what_it_needs_and_no_more_bytes_in_a_larger_world(tmp_path: Path) -> None:
    ranks.start(exchanging.in_world, exchanging.WORLD, str(tmp_path), exchanging.WORLD, 60, exchanging.everything)


def test_what_travels_of_a_rollout_is_its_own_whatever_lay_in_the_memory() -> None:
    """Ids, log-probs (0 of tokens that were not sampled) and marks of what follows the prompt, at their places."""
    rollouts, _ = exchanging.rollouts_of(2, 8, 0, 1, 1)
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
        assert again.sequence_lengths == rollouts.held[row].sequence_lengths
    assert any(len(rollouts.held[row].sequence_lengths) > 1 for row in several)


def test_a_reward_per_token_takes_four_bytes_of_each_response_token_and_versions_none() -> None:
    rollouts, _ = exchanging.rollouts_of(6, 8, 0, 1, 1)
    without = replace(rollouts, token_weights={})
    more = sizes_of(rollouts) - sizes_of(without)
    assert abs(more - 2 * 4 * rollouts.facts["length"]).max() < 4
    rollout = next(one for one in rollouts.held.values() if len(one.segments) == 3)
    rollout.segments[2] = replace(rollout.segments[2], version=rollout.segments[1].version + 254)
    row = int(rollout.sample_id) * exchanging.COUNT + rollout.index
    with pytest.raises(ExchangeError, match="255 successive versions"):
        flatten(rollouts, row, np.zeros(sizes_of(rollouts)[row], dtype=np.uint8))


@pytest.mark.parametrize("hangs", [False, True])
def test_a_rank_that_does_not_hand_over_is_named_within_the_deadline(tmp_path: Path, hangs: bool) -> None:
    if hangs:
        (tmp_path / "hangs").touch()
    ranks.start(exchanging.in_world, 3, str(tmp_path), 3, 2, exchanging.one_is_missing)
    for rank in (0, 1):
        seconds, _, said = (tmp_path / f"said_{rank}").read_text().partition(" ")
        assert said.startswith("rank 2 did not"), said
        assert float(seconds) < 8
