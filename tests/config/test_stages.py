"""Layers over pipeline stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.pipeline_split import chunk_layers, stage_layers


@pytest.mark.parametrize(
    ("layers", "pipeline", "virtual", "stages"),
    [
        (36, 4, 1, [9, 9, 9, 9]),
        (94, 4, 1, [23, 24, 24, 23]),
        (94, 8, 4, [11, 12, 12, 12, 12, 12, 12, 11]),
        (6, 2, 2, [3, 3]),
        (94, 8, 1, [11, 12, 12, 12, 12, 12, 12, 11]),
        (5, 2, 1, [3, 2]),
        (94, 4, 2, [23, 24, 24, 23]),
        (5, 4, 1, [2, 1, 1, 1]),
        (10, 8, 1, [2, 1, 1, 1, 1, 1, 1, 2]),
        (10, 4, 2, [4, 2, 2, 2]),
    ],
)
def test_known_models(layers: int, pipeline: int, virtual: int, stages: list[int]) -> None:
    assert stage_layers(layers, pipeline, virtual) == stages


@given(st.integers(1, 200), st.integers(1, 32), st.integers(1, 4))
def test_no_stage_is_fuller_than_it_must_be_and_none_is_empty(layers: int, pipeline: int, virtual: int) -> None:
    rows, odd = divmod(layers, virtual)
    evened = virtual > 1 and (layers + 2) % (pipeline * virtual) == 0 and layers + 2 >= 2 * pipeline * virtual
    try:
        chunks = chunk_layers(layers, pipeline, virtual)
    except ValueError:
        # Too few, or neither the fullest stages nor those with one layer less between the first and the last add up.
        assert not evened
        assert odd or rows < pipeline or (rows % pipeline > 2 and rows - -(-rows // pipeline) * (pipeline - 2) < 2)
        return
    stages = stage_layers(layers, pipeline, virtual)
    assert stages == [sum(counts) for counts in chunks]
    assert len(stages) == pipeline
    assert sum(stages) == layers
    assert min(map(min, chunks)) > 0
    assert max(map(max, chunks)) == -(-layers // (pipeline * virtual))
    inner = [count for counts in chunks for count in counts][1:-1]
    if evened and layers % (pipeline * virtual):
        assert set(inner) == {chunks[0][0] + 1} == {chunks[-1][-1] + 1}
    else:
        assert all(len(set(counts)) == 1 for counts in chunks)
        assert len(set(stages[1:-1])) <= 1  # all that Megatron can be told
