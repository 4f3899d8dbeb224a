"""The kills that `prove-resume` draws reach every part of a step, all through the run."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from megatron_rl.resume_proof.points import POINTS
from megatron_rl.resume_proof.proof import draw

SECONDS = {"generate": 2.0, "update": 1.0, "sync": 0.01, "write": 0.5}


@pytest.mark.parametrize("seed", range(20))
def test_kills_are_spread_over_parts_and_steps(seed: int) -> None:
    kills = draw(random.Random(seed), 10, 4, SECONDS)
    parts = Counter(part for kill in kills for part, points in POINTS.items() if kill.point in points)
    assert parts == dict.fromkeys(POINTS.keys() - {"turn"}, 2), "without agents there are no turns"
    assert [kill.step for kill in kills] == sorted(kill.step for kill in kills)
    assert {kill.step for kill in kills} == {0, 1, 2, 3}, "one after the last step would find the run done"


@pytest.mark.parametrize("seed", range(20))
def test_a_kill_comes_while_its_phase_lasts(seed: int) -> None:
    for kill in draw(random.Random(seed), 10, 4, SECONDS):
        assert 0 <= kill.delay < max(SECONDS.get(kill.point, 0.0), 1e-9)
        assert kill.delay == 0 or SECONDS[kill.point] > 0.05


def test_with_split_placement_a_kill_comes_from_the_role_whose_phase_it_is() -> None:
    kills = draw(random.Random(0), 60, 4, SECONDS, 9, generator=3)
    ranks = {kill.point: {other.rank for other in kills if other.point == kill.point} for kill in kills}
    assert {point for point, of in ranks.items() if of == {3}} == {"generate", "turn", "reward"}
    assert all(of == {0} for point, of in ranks.items() if point not in ("generate", "turn", "reward"))


def test_kills_come_after_any_turn_of_a_conversation() -> None:
    turns = [kill for kill in draw(random.Random(0), 60, 4, SECONDS, 9) if kill.point == "turn"]
    assert len(turns) == 10
    assert {kill.delay for kill in turns} == {0.0}
    only = draw(random.Random(0), 60, 4, SECONDS, 9, ["turn"])
    assert {kill.point for kill in only} == {"turn"}
    assert {kill.count for kill in only} == set(range(1, 10))
