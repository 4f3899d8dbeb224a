"""Texts of 40,000 characters, of one repeated piece: no function that reads a model's text takes long over them."""

from __future__ import annotations

import re

import pytest

from tests.fuzz import lengths


@pytest.mark.parametrize("name", lengths.FUNCTIONS)
def test_time_grows_with_the_length_no_faster(name: str) -> None:
    function = lengths.FUNCTIONS[name]
    for piece in lengths.PIECES:
        for length in (1_000, lengths.LENGTH):
            found = lengths.growth(function, piece, "!", length)
            assert found < lengths.TOO_MUCH, (
                f"{piece!r} x {length}: {found:.1f} x as long per character as at an eighth"
            )


@pytest.mark.parametrize(("pattern", "length"), [(r"\s+$", 8_000), (r"\s+\s+$", 500)], ids=["quadratic", "cubic"])
def test_a_pattern_tried_from_each_blank_is_seen(pattern: str, length: int) -> None:
    assert lengths.growth(re.compile(pattern).search, " ", "!", length) > 2 * lengths.TOO_MUCH


def test_a_slow_machine_is_no_fault() -> None:
    """Forty times as long as the bound allows, in proportion to the length."""
    assert lengths.growth(lambda text: [sum(range(8_000)) for _ in text], " ", "!", 1_000) < lengths.TOO_MUCH
