"""How many of the model's layers each pipeline stage holds."""

from __future__ import annotations

from functools import lru_cache
from itertools import chain, islice


def chunk_layers(layers: int, pipeline: int, virtual_pipeline: int = 1) -> list[list[int]]:
    """Layers of the model chunks of each of `pipeline` stages.

    Where they do not divide evenly over several chunks per stage, embedding and output layer count as a layer each: 94
    layers over 8 stages of 4 chunks are 3 in every chunk but the very first and the very last, which hold 2.

    Else all chunks of a stage are alike, the inner stages hold the rounded-up mean, and the first and the last, which also
    hold the embedding and the output layer, share the rest: 94 layers over 8 stages are 11, six times 12, 11. Where that
    leaves one of them without a layer, the inner stages hold one less: 5 over 4 are 2, 1, 1, 1.

    Raises:
        ValueError: neither is possible: Megatron-Core gives all inner stages the same number. The message names no key.
    """
    chunks = pipeline * virtual_pipeline
    if layers % chunks == 0:
        return [[layers // chunks] * virtual_pipeline for _ in range(pipeline)]
    each, odd = divmod(layers + 2, chunks)
    if virtual_pipeline > 1 and not odd and each > 1:
        counts = [[each] * virtual_pipeline for _ in range(pipeline)]
        counts[0][0] -= 1
        counts[-1][-1] -= 1
        return counts
    rows, odd = divmod(layers, virtual_pipeline)
    if odd:
        raise ValueError(
            f"{layers} layers do not divide over {virtual_pipeline} model chunks per stage, nor do {layers + 2}, with "
            f"embedding and output layer, over {chunks} chunks of two or more"
        )
    return [[count] * virtual_pipeline for count in _spread(rows, pipeline, virtual_pipeline)]


def stage_layers(layers: int, pipeline: int, virtual_pipeline: int = 1) -> list[int]:
    """Layers on each stage, of all its chunks. Raises as `chunk_layers`."""
    return [sum(chunks) for chunks in chunk_layers(layers, pipeline, virtual_pipeline)]


@lru_cache
def stage_numbers(layers: int, pipeline: int, virtual_pipeline: int = 1) -> tuple[tuple[int, ...], ...]:
    """The layers of each stage by number, in its order: one chunk after the other. Raises as `chunk_layers`."""
    numbers = iter(range(layers))
    # The first chunks of all stages one after the other, then their second ones.
    rows = zip(*chunk_layers(layers, pipeline, virtual_pipeline), strict=True)
    chunks = [[tuple(islice(numbers, count)) for count in row] for row in rows]
    return tuple(tuple(chain.from_iterable(stage)) for stage in zip(*chunks, strict=True))


def _spread(rows: int, pipeline: int, virtual_pipeline: int) -> list[int]:
    """Layers of every chunk of each stage."""
    fullest = middle = -(-rows // pipeline)
    rest = rows - middle * (pipeline - 2)
    if rest < 2:
        middle -= 1
        rest = rows - middle * (pipeline - 2)
    if middle < 1 or -(-rest // 2) > fullest:
        chunks = f" of {virtual_pipeline} chunks each" if virtual_pipeline > 1 else ""
        few = rows < pipeline
        why = f"{rows} for {pipeline}" if few else "all but the first and the last hold the same number"
        raise ValueError(f"{rows * virtual_pipeline} layers cannot be spread over {pipeline} stages{chunks} ({why})")
    return [-(-rest // 2), *[middle] * (pipeline - 2), rest // 2]
