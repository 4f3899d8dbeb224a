"""Texts of 40,000 characters, of one repeated piece: no function that reads a model's text takes long over them."""

from __future__ import annotations

import pytest

from tests.fuzz import lengths


@pytest.mark.parametrize("name", lengths.FUNCTIONS)
def test_time_grows_with_the_length_no_faster(name: str) -> None:
    function = lengths.FUNCTIONS[name]
    for piece in lengths.PIECES:
        for length in (1_000, lengths.LENGTH):
            found = lengths.slowness(function, piece, "!", length)
            assert found < 1, f"{piece!r} x {length}: {found * lengths.PER_CHARACTER * 1e6:.0f} us per character"
