"""The order of prompts: a pure function of seed and position."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.tasks import PromptOrder


def test_an_epoch_has_every_prompt_once_and_the_next_is_shuffled_anew() -> None:
    order = PromptOrder(50, seed=3)
    first, second = order.take(0, 50), order.take(50, 50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != list(range(50))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(-5, 5), st.lists(st.integers(0, 20), max_size=6))
def test_any_way_of_taking_gives_the_same_sequence(size: int, seed: int, counts: list[int]) -> None:
    whole = PromptOrder(size, seed).take(0, sum(counts))
    parts: list[int] = []
    order = PromptOrder(size, seed)
    for count in counts:
        parts += order.take(len(parts), count)
    assert parts == whole
    middle = sum(counts) // 2
    assert PromptOrder(size, seed).take(middle, sum(counts) - middle) == whole[middle:]


def test_seeds_and_epochs_have_nothing_in_common() -> None:
    orders = [tuple(PromptOrder(30, seed).take(30 * epoch, 30)) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == 16


def test_the_order_is_the_same_in_every_release() -> None:
    assert PromptOrder(10, seed=0).take(7, 6) == [8, 2, 4, 7, 8, 5]


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptOrder(0, seed=0)
    with pytest.raises(ValueError, match="must not be negative"):
        PromptOrder(3, seed=0).take(-1, 2)
