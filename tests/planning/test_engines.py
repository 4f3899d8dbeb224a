"""Engines against closed forms and against a pass-by-pass simulation."""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.planning.simulation.engines import BLOCK, EngineSpeed, SimulatedGeneration, generate
from megatron_rl.planning.time.lengths import LogNormal

WIDE = EngineSpeed(
    lambda running, context: 0.01 + 1e-4 * running + 1e-6 * running * context, lambda tokens: 0.0, 1e9, 512
)


def run(speed: EngineSpeed, lengths: np.ndarray, engines: int = 1, prompt: float = 10.0) -> SimulatedGeneration:
    return generate(speed, engines, prompt, np.zeros_like(lengths), lengths, range(len(lengths)))


def token_by_token(speed: EngineSpeed, lengths: list[int], prompt: float) -> float:
    """One engine without a limit of its cache: every pass by itself."""
    waiting, running, seconds = lengths[::-1], list[tuple[int, int]](), 0.0
    while waiting or running:
        while waiting and len(running) < speed.max_concurrent:
            running.append((0, waiting.pop()))
        mean = prompt + sum(drawn for drawn, _ in running) / len(running) + 1
        seconds += speed.decode_seconds(len(running), mean)
        running = [(drawn + 1, length) for drawn, length in running if drawn + 1 < length]
    return seconds


def test_a_constant_batch_takes_its_passes() -> None:
    found = run(WIDE, np.full((4, 8), 100))
    passes = sum(WIDE.decode_seconds(32, 10 + done) for done in range(1, 101))
    assert found.seconds == pytest.approx(passes)
    assert found.idle_share == pytest.approx(0)
    assert found.tail_share == pytest.approx(0)
    assert (found.left == 0).all()
    assert found.running == [[(0.0, 32), (found.seconds, 0)]]


@pytest.mark.parametrize("concurrent", [7, 16, 512])
def test_segments_are_the_sum_of_their_passes(concurrent: int) -> None:
    lengths, _ = LogNormal(60, 0.8, 200).draw(np.random.default_rng(1), 8, 4)
    speed = EngineSpeed(WIDE.decode_seconds, WIDE.prefill_seconds, 1e9, concurrent)
    assert run(speed, lengths).seconds == pytest.approx(token_by_token(speed, lengths.ravel().tolist(), 10), rel=1e-9)


def test_engines_that_decode_one_at_a_time_are_servers_of_one_queue() -> None:
    """The queue with k servers: each takes the next as it becomes free."""
    lengths, _ = LogNormal(300, 1.0, 4000).draw(np.random.default_rng(2), 200, 1)
    speed = EngineSpeed(lambda running, context: 0.01, lambda tokens: 0.0, 1e9, 1)
    free = [0.0] * 5
    for length in lengths.ravel().tolist():
        heapq.heapreplace(free, free[0] + 0.01 * length)
    found = run(speed, lengths, engines=5)
    assert found.seconds == pytest.approx(max(free))
    assert found.idle_share == pytest.approx(1 - sum(free) / 5 / max(free))


def test_long_queues_keep_all_engines_at_work() -> None:
    lengths, _ = LogNormal(100, 0.2, 1000).draw(np.random.default_rng(3), 2000, 4)
    speed = EngineSpeed(lambda running, context: 0.02, lambda tokens: 0.0, 1e9, 16)
    found = run(speed, lengths, engines=8)
    assert found.seconds == pytest.approx(0.02 * lengths.sum() / (8 * 16), rel=0.03)
    assert found.idle_share < 0.03


def test_the_longest_first_ends_sooner() -> None:
    lengths, expected = LogNormal(500, 1.0, 8000, between=0.9).draw(np.random.default_rng(4), 256, 4)
    speed = EngineSpeed(lambda running, context: 0.02, lambda tokens: 0.0, 1e9, 16)
    as_given = generate(speed, 8, 10, np.zeros_like(lengths), lengths, range(256))
    sorted_ = generate(speed, 8, 10, np.zeros_like(lengths), lengths, np.argsort(-expected).tolist())
    assert sorted_.seconds < 0.95 * as_given.seconds
    assert sorted_.idle_share < as_given.idle_share


def test_a_full_cache_sets_the_last_back_and_loses_nothing() -> None:
    lengths = np.full((8, 4), 400)
    speed = EngineSpeed(lambda running, context: 0.01, lambda tokens: tokens * 1e-4, 5000.0, 512)
    found = run(speed, lengths)
    assert found.set_back > 0
    assert (found.left == 0).all()
    # Places for 5000 / 410 sequences of full length; no more than the cache holds are ever under way.
    assert found.seconds > 0.01 * lengths.sum() / (5000 / (10 + BLOCK))
    assert run(WIDE, lengths).set_back == 0
    with pytest.raises(ValueError, match="does not hold a sequence of 410"):
        run(EngineSpeed(WIDE.decode_seconds, WIDE.prefill_seconds, 409.0, 8), lengths)


def test_the_cache_is_never_overfull() -> None:
    held: list[float] = []
    read: list[float] = []

    def pass_seconds(running: int, context: float) -> float:
        held.append(running * context)
        return 0.01

    def read_seconds(tokens: float) -> float:
        read.append(tokens)
        return 0.0

    lengths = np.full((16, 1), 1000)  # one by one: what is read is a prompt, and what was drawn before it was set back
    found = run(EngineSpeed(pass_seconds, read_seconds, 6000.0, 64), lengths)
    assert 5000 < max(held) <= 6000
    assert found.set_back > 10
    assert max(read) < 6000
    # What each has drawn until then, not all that it will draw.
    assert sum(read) < 16 * 10 + found.set_back * 700


def test_responses_in_two_chunks_end_whole_and_what_is_in_the_cache_is_not_read_again() -> None:
    lengths, _ = LogNormal(200, 0.8, 1000).draw(np.random.default_rng(6), 12, 4)
    chunk, reading = np.minimum(lengths, 150), replace(WIDE, prefill_seconds=lambda tokens: 1e-4 * tokens)
    first = generate(reading, 3, 10, np.zeros_like(lengths), chunk, range(12))
    again = generate(reading, 3, 10, chunk, lengths - chunk, range(12))
    cached = generate(reading, 3, 10, chunk, lengths - chunk, range(12), read_before=np.ones(12, dtype=bool))
    for part in (first, again, cached):
        assert (part.left == 0).all()
        assert not np.isnan(part.ends).any()
    assert (again.ends[lengths == chunk] == 0).all()
    assert cached.seconds < again.seconds < run(reading, lengths, engines=3).seconds
