"""Response lengths and an engine's time against drawing them and decoding them one step at a time."""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.config.published import published_config
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.models import model_of
from megatron_rl.predict.generation import Decoding
from megatron_rl.predict.hardware import TABLES
from megatron_rl.predict.lengths import Lengths

LENGTHS = Lengths.log_normal(1500, 4096, spread=0.7, prompt=100)


def drawn(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(LENGTHS.quantiles(count))


def test_lengths_have_the_given_mean_and_limit() -> None:
    values = LENGTHS.quantiles(100_000)
    assert LENGTHS.mean == pytest.approx(1500, rel=1e-6)
    assert values.mean() == pytest.approx(1500, rel=0.01)
    assert values.max() == 4096
    assert LENGTHS.square == pytest.approx((values**2).mean(), rel=0.01)
    assert LENGTHS.pairs == pytest.approx(((100 + values) ** 2).mean() / 2, rel=0.01)


def test_the_longest_of_a_few_is_the_mean_of_drawn_maxima() -> None:
    values = np.random.default_rng(0).choice(LENGTHS.quantiles(10_000), (5000, 16)).max(axis=1)
    assert LENGTHS.longest(16) == pytest.approx(values.mean(), rel=0.02)
    assert Lengths.recorded(values, 0).mean == pytest.approx(values.mean(), rel=0.02)


def test_lengths_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 100 tokens"):
        Lengths.log_normal(100, 100)


def one_by_one(engine: Decoding, lengths: np.ndarray, places: int) -> float:
    """Seconds of one engine that draws `lengths` in turn, `places` at a time: from end to end of a response."""
    ends: list[tuple[float, float]] = []  # number of the step at which a response ends, its length
    now = seconds = 0.0
    waiting = list(lengths)
    while waiting or ends:
        while waiting and len(ends) < places:
            length = waiting.pop()
            heapq.heappush(ends, (now + length, length))
        end, _ = ends[0]
        context = LENGTHS.prompt + float(np.mean([length - (stop - now) for stop, length in ends]))
        seconds += (end - now) * engine.step_seconds(len(ends), context + (end - now) / 2)
        now = heapq.heappop(ends)[0]
    return seconds


@pytest.mark.parametrize(("responses", "places"), [(64, 64), (512, 64), (200, 128)])
def test_a_batch_takes_as_long_as_one_decoded_step_by_step(responses: int, places: int) -> None:
    found = published_config("Qwen3-8B")
    assert found is not None
    engine = Decoding(model_of(found), RolloutConfig(max_concurrent=places), TABLES["h100"], 1e9)
    counted = np.mean([one_by_one(engine, drawn(responses, seed), places) for seed in range(4)])
    predicted = engine.generate(responses, responses, LENGTHS)
    assert predicted.places == min(places, responses)
    assert predicted.seconds - predicted.prompts == pytest.approx(counted, rel=0.08)
    assert 0 < predicted.idle < 1
    slower = replace(engine, hardware=replace(engine.hardware, memory=engine.hardware.memory / 2))
    assert slower.generate(responses, responses, LENGTHS).seconds > predicted.seconds
