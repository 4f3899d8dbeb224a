"""Damaged checkpoints, the same ones every time: refused by name, or right. `make fuzz` goes on from there."""

from __future__ import annotations

import pytest

from tests.fuzz import checkpoints


@pytest.mark.parametrize("first", [0, 20, 40])  # 42: an archive's index with a negative place was a traceback
def test_a_damaged_checkpoint_is_refused_or_right(first: int) -> None:
    for number in range(first, first + 20):
        checkpoints.try_case(number)
