"""Response lengths and an engine's time against drawing them and decoding them one step at a time."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.config import load_recipe
from megatron_rl.config.published import published_config
from megatron_rl.config.rollout_keys import SpeculationConfig
from megatron_rl.config.schema import RolloutConfig
from megatron_rl.models import model_of
from megatron_rl.planning.components import GIB
from megatron_rl.planning.memory import make_plan
from megatron_rl.planning.simulation.engines import EngineSpeed, generate
from megatron_rl.planning.time.generation import Decoding
from megatron_rl.planning.time.hardware import TABLES
from megatron_rl.planning.time.lengths import Lengths, LogNormal

RECIPES = Path(__file__).parents[2] / "recipes" / "scale"
LENGTHS = Lengths.log_normal(1500, 4096, spread=0.7, prompt=100)


def mixed(count: int, seed: int = 0) -> np.ndarray:
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
    engine = Decoding(model_of(found), RolloutConfig(max_concurrent=places), TABLES["h100"], 1e9, 0.0)
    counted = np.mean([one_by_one(engine, mixed(responses, seed), places) for seed in range(4)])
    predicted = engine.generate(responses, responses, LENGTHS)
    assert predicted.places == min(places, responses)
    assert predicted.seconds - predicted.prompts == pytest.approx(counted, rel=0.08)
    assert 0 < predicted.idle < 1
    slower = replace(engine, hardware=replace(engine.hardware, memory=engine.hardware.memory / 2))
    assert slower.generate(responses, responses, LENGTHS).seconds > predicted.seconds


def test_drafts_make_passes_longer_and_fewer() -> None:
    found = published_config("Qwen3-8B")
    assert found is not None
    drafting = RolloutConfig(max_concurrent=64, speculation=SpeculationConfig(tokens=4, below=16))
    pass_of = Decoding(model_of(found), drafting, TABLES["h100"], 1e9, 0.0, drafted_share=1e-12).step_seconds
    engine = Decoding(model_of(found), drafting, TABLES["h100"], 1e9, 0.0, drafted_share=0.5)
    plain = Decoding(
        model_of(found), RolloutConfig(max_concurrent=64, async_scheduling=False), TABLES["h100"], 1e9, 0.0
    )
    rng, accepted, passes = np.random.default_rng(0), 0, 0
    for _ in range(10_000):  # every guess is right with probability a half, until the first that is not
        passes, accepted = passes + 1, accepted + min(4, int(rng.geometric(0.5)) - 1)
    share = accepted / (accepted + passes)
    counted = passes * pass_of(8, 1000) / (accepted + passes)
    assert replace(engine, drafted_share=share).step_seconds(8, 1000) == pytest.approx(counted)
    assert plain.step_seconds(8, 1000) < pass_of(8, 1000) < plain.step_seconds(40, 1000)
    assert engine.step_seconds(16, 1000) < plain.step_seconds(16, 1000)
    assert engine.step_seconds(17, 1000) == plain.step_seconds(17, 1000), "too many for drafts"
    assert engine.generate(64, 64, LENGTHS).seconds < plain.generate(64, 64, LENGTHS).seconds
    under_way = RolloutConfig(max_concurrent=64)  # its host prepares a pass under the one before
    assert replace(plain, rollout=under_way).step_seconds(17, 1000) < engine.step_seconds(17, 1000)


# Recipe of recipes/scale, nodes, responses' mean, `rollout.max_concurrent`: caches that are full, that are not, and groups
# that are handed out as engines become free.
SIMULATED = [
    ("qwen3-8b", 2, 4096, 512),
    ("qwen3-32b", 16, 4096, 512),
    ("qwen3-30b-a3b", 4, 4096, 512),
    ("qwen3-235b-a22b", 16, 4096, 512),
    ("qwen3-235b-a22b", 128, 4096, 512),
    ("qwen3-32b", 4, 1500, 512),
    ("qwen3-32b", 4, 4096, 128),
    ("qwen3-30b-a3b", 4, 1500, 32),
    ("qwen3.6-35b-a3b", 4, 1500, 512),  # a sequence's state takes more of the cache than its tokens
]


DRAWS = 12


@pytest.mark.parametrize(("recipe", "nodes", "mean", "concurrent"), SIMULATED)
def test_engines_take_as_long_as_when_every_response_is_simulated(
    recipe: str, nodes: int, mean: int, concurrent: int
) -> None:
    config = load_recipe(RECIPES / f"{recipe}.yaml", [f"rollout.max_concurrent={concurrent}"])
    found = published_config((config.model.path or "").rpartition("/")[2])
    assert found is not None
    plan = make_plan(config, model_of(found), 8 * nodes, 79 * GIB)
    engine = Decoding(plan.model, config.rollout, TABLES["h100"], plan.cache_tokens, plan.state_tokens)
    prompts, count, limit = config.trainer.prompts_per_step, config.rollout.group_size, config.rollout.max_tokens
    lengths = Lengths.log_normal(mean, limit, prompt=512)
    speed = EngineSpeed(
        cache(lambda running, context: engine.step_seconds(running, round(context / 64) * 64)),
        lambda tokens: engine.prompt_seconds(tokens, tokens * 256),
        plan.cache_tokens,
        concurrent,
        plan.state_tokens,
    )
    seconds = []
    for seed in range(DRAWS):
        drawn, _ = LogNormal(mean, 0.6, limit).draw(np.random.default_rng(seed), prompts, count)
        nothing = np.zeros_like(drawn)
        seconds.append(generate(speed, plan.engines, 512, nothing, drawn, range(prompts)).seconds)
    responses = prompts * count
    predicted = engine.generate(responses / plan.engines, responses, lengths).seconds
    # A draw's longest response decides when it ends, so draws differ by 4 to 9 %; their mean is off by its standard error.
    error = float(np.std(seconds, ddof=1)) / math.sqrt(DRAWS)
    assert abs(predicted - np.mean(seconds)) < 0.1 * np.mean(seconds) + 3 * error
    alone = engine.generate(responses / plan.engines, responses / plan.engines, lengths).seconds
    assert alone < 0.97 * predicted  # no engine waits for another one


def test_longer_responses_end_at_the_same_limit() -> None:
    longer = LENGTHS.longer(1.2)
    assert longer.mean == pytest.approx(1.2 * LENGTHS.mean, rel=1e-6)
    assert len(longer.alive) * longer.cell == pytest.approx(4096)
    assert LENGTHS.mean < LENGTHS.longer(100).mean < 4096
    assert LENGTHS.longer(1.0).alive == pytest.approx(LENGTHS.alive)
