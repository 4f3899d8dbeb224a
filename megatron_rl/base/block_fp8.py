"""Numbers in block-wise FP8 as DeepSeek and Qwen publish it: e4m3 values, one fp32 scale per 128 x 128 block.

`weight_scale_inv` is what a stored value is multiplied by: the block's largest magnitude / 448. Importing it loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 128
DTYPE = "F8_E4M3"
LARGEST = 448.0  # that e4m3 holds
SCALE = "_scale_inv"  # appended to the weight's name
_MOST = 2**24  # numbers that exist in fp32 at once


def scales_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    return -(-shape[0] // BLOCK), -(-shape[1] // BLOCK)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] of any float dtype -> e4m3 of the same shape, and fp32 scales of the blocks, on its device. Or
    [experts, rows, columns], each expert on its own; rows are then a multiple of a block.

    A block with a value that is not finite has a scale that is not; the device is not waited for.
    """
    import torch

    if weight.dim() == 3:
        values, scales = quantise(weight.flatten(0, 1))
        return values.view(weight.shape), scales.view(len(weight), -1, scales.shape[1])
    rows, columns = weight.shape
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(scales_shape((rows, columns)), dtype=torch.float32, device=weight.device)
    width = scales.shape[1] * BLOCK
    step = max(1, _MOST // (width * BLOCK))  # rows of blocks at a time: fp32 copies stay small
    for index in range(0, scales.shape[0], step):
        tile_rows = weight[index * BLOCK : (index + step) * BLOCK]
        padded = tile_rows.new_zeros(-(-len(tile_rows) // BLOCK) * BLOCK, width, dtype=torch.float32)
        padded[: len(tile_rows), :columns] = tile_rows
        blocks = padded.view(-1, BLOCK, scales.shape[1], BLOCK)
        scale = blocks.abs().amax(dim=(1, 3)) / LARGEST
        scale = scale.masked_fill(scale == 0, 1.0)
        scaled = (blocks / scale[:, None, :, None]).clamp(-LARGEST, LARGEST).view(-1, width)
        values[index * BLOCK : (index + step) * BLOCK] = scaled[: len(tile_rows), :columns].to(torch.float8_e4m3fn)
        scales[index : index + step] = scale
    return values, scales


def dequantise(values: Tensor, scales: Tensor) -> Tensor:
    """The fp32 numbers of a result of `quantise`."""
    rows, columns = values.shape[-2:]
    each = scales.repeat_interleave(BLOCK, -2)[..., :rows, :].repeat_interleave(BLOCK, -1)[..., :columns]
    return values.float() * each
