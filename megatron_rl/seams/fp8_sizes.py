"""Bytes of Transformer Engine's FP8 tensors, by their shapes: data, and the scales with their padding. No torch. Written for
2.11, `Float8BlockQuantizer.get_scale_shape` and the `make_empty` of its quantisers; `tests/te` holds them to its own tensors.

`recipe` is one of `actor.fp8`: `delayed` and `tensorwise` have one float32 scale per tensor, `blockwise` one per 128 numbers
(of weights per 128 x 128), `mxfp8` one of a byte per 32 numbers.
"""

from __future__ import annotations

# Rows of an expert are padded to a multiple of this: `get_align_size_for_quantization`.
ROWS_OF_EXPERTS = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _blocks(number: int, size: int) -> int:
    return -(-number // size)


def input_bytes(rows: int, columns: int, recipe: str, columnwise: bool = True) -> int:
    """A product's input in one direction: by columns, as the weight's gradient reads it, or by rows, as the product does."""
    along, across = (rows, columns) if columnwise else (columns, rows)
    if recipe == "blockwise":
        scales = 4 * _blocks(along, 128) * _up(across, 4)
    elif recipe == "mxfp8":
        scales = _up(_blocks(along, 32), 4) * _up(across, 128)
    else:
        scales = 4
    return rows * columns + scales


def weight_bytes(rows: int, columns: int, recipe: str) -> int:
    """A weight in both directions, as Hopper needs it, whose FP8 products read theirs in one orientation only, and as MXFP8
    does on any card; with per-tensor scales Blackwell needs half."""
    if recipe == "mxfp8":
        return sum(input_bytes(rows, columns, recipe, columnwise) for columnwise in (False, True))
    scales = 4
    if recipe == "blockwise":
        high, wide = _blocks(rows, 128), _blocks(columns, 128)
        scales = 4 * (high * _up(wide, 4) + wide * _up(high, 4))
    return 2 * rows * columns + scales


def bytes_per_number(recipe: str) -> float:
    """Bytes of a large product's input in one direction."""
    return {"blockwise": 1 + 4 / 128, "mxfp8": 1 + 1 / 32}.get(recipe, 1.0)
