"""Which prompts share a step, by how long the last responses to them were."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.schema import Config
from megatron_rl.data.like_lengths import LikeLengths, of_like_lengths
from megatron_rl.tasks import PromptOrder, make_order
from megatron_rl.trainer.run import visits_of_new_prompts


def test_long_ones_share_a_step_in_the_blocks_order() -> None:
    means = np.array([5.0, 50, 6, 60, 7, 70])
    assert of_like_lengths([0, 1, 2, 3, 4, 5], means, 2) == [[3, 5], [1, 4], [0, 2]]
    assert of_like_lengths([5, 4, 3, 2, 1, 0], means, 3) == [[5, 3, 1], [4, 2, 0]]


def test_before_anything_is_known_prompts_come_as_without() -> None:
    assert of_like_lengths([3, 1, 2, 0], np.full(4, np.nan), 2) == [[3, 1], [2, 0]]


def test_one_of_which_nothing_is_known_is_in_the_middle() -> None:
    assert of_like_lengths([0, 1, 2, 3, 4, 5], np.array([1, 9, np.nan, 8, 2, 5.0]), 2) == [[1, 3], [2, 5], [0, 4]]


def test_a_prompt_that_comes_twice_comes_in_two_steps() -> None:
    means = np.array([9.0, 8, 7])
    assert of_like_lengths([0, 1, 0, 2], means, 2) == [[0, 1], [0, 2]]
    # The last ones are the same prompt: one changes places.
    assert of_like_lengths([2, 0, 1, 2], means, 2) == [[0, 2], [2, 1]]
    assert of_like_lengths([0, 0, 0, 1], means, 2) == [[0, 0], [0, 1]], "it is three times in two steps"


@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 10**6))
def test_every_block_has_its_prompts(steps: int, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    block = rng.integers(31, size=steps * count).tolist()
    means = np.where(rng.random(31) < 0.3, np.nan, rng.integers(1, 20, size=31).astype(float))
    of_steps = of_like_lengths(block, means, count)
    assert Counter(prompt for step in of_steps for prompt in step) == Counter(block)
    assert [len(step) for step in of_steps] == [count] * steps


@given(st.integers(1, 5), st.integers(1, 7), st.integers(8, 40), st.integers(0, 2**30))
def test_blocks_follow_the_order_whatever_is_known_when(steps: int, count: int, prompts: int, seed: int) -> None:
    order, rng = PromptOrder(prompts, seed), np.random.default_rng(seed)
    state, position, drawn = LikeLengths.unknown([str(i) for i in range(prompts)]), 0, list[int]()
    for _ in range(3 * steps):
        places, state, position = state.next_step(order.take, position, count, steps, seed)
        assert len(places) == count
        drawn += places
        state = state.learned({place: float(rng.integers(1, 9)) for place in places})
        state = LikeLengths.unpack(state.pack(), [str(i) for i in range(prompts)])
    for begin in range(0, 3 * steps * count, steps * count):
        assert Counter(drawn[begin : begin + steps * count]) == Counter(order.take(begin, steps * count))
    assert position == len(drawn)
    assert not state.queue


def test_another_number_of_prompts_a_step_loses_none() -> None:
    order = PromptOrder(20, 1)
    state = LikeLengths.unknown([str(i) for i in range(20)])
    first, state, position = state.next_step(order.take, 0, 4, 3, 0)
    second, state, position = state.next_step(order.take, position, 5, 1, 0)
    third, state, position = state.next_step(order.take, position, 5, 1, 0)
    assert first + second + third == order.take(0, 14)
    assert position - len(state.queue) == 14


def test_prompts_of_a_small_task_come_twice_though_the_steps_take_fewer_than_there_are() -> None:
    config, tasks = Config(run_dir=""), ["few"] * 4 + ["many"] * 40
    config.trainer.steps, config.trainer.prompts_per_step = 6, 2
    for weights, visits in ((None, 12), ({"few": 1.0, "many": 1.0}, 0), ({"few": 0.1, "many": 1.0}, 12)):
        sampler: Any = SimpleNamespace(order=make_order(tasks, weights, 3), prompts=SimpleNamespace(train=tasks))
        assert visits_of_new_prompts(config, sampler) == visits
    config.trainer.steps = 23
    assert visits_of_new_prompts(config, sampler) == 0
