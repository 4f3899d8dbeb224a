"""Layers over pipeline stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.stages import stage_layers


@pytest.mark.parametrize(
    ("layers", "pipeline", "virtual", "stages"),
    [
        (36, 4, 1, [9, 9, 9, 9]),
        (94, 4, 1, [23, 24, 24, 23]),
        (94, 8, 1, [11, 12, 12, 12, 12, 12, 12, 11]),
        (5, 2, 1, [3, 2]),
        (94, 4, 2, [24, 24, 24, 22]),
        (5, 4, 1, [2, 1, 1, 1]),
        (10, 8, 1, [2, 1, 1, 1, 1, 1, 1, 2]),
        (10, 4, 2, [4, 2, 2, 2]),
    ],
)
def test_known_models(layers: int, pipeline: int, virtual: int, stages: list[int]) -> None:
    assert stage_layers(layers, pipeline, virtual) == stages


@given(st.integers(1, 200), st.integers(1, 32), st.integers(1, 4))
def test_no_stage_is_fuller_than_it_must_be_and_none_is_empty(layers: int, pipeline: int, virtual: int) -> None:
    try:
        stages = stage_layers(layers, pipeline, virtual)
    except ValueError:
        # Too few, or neither the fullest stages nor those with one layer less between the first and the last add up.
        rows, odd = divmod(layers, virtual)
        assert odd or rows < pipeline or (rows % pipeline > 2 and rows - -(-rows // pipeline) * (pipeline - 2) < 2)
        return
    assert len(stages) == pipeline
    assert sum(stages) == layers
    assert min(stages) > 0
    assert max(stages) == -(-(layers // virtual) // pipeline) * virtual
    assert all(count % virtual == 0 for count in stages)
    assert len(set(stages[1:-1])) <= 1  # all that Megatron can be told
