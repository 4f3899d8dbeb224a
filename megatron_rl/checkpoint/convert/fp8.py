"""Block-wise FP8 as DeepSeek and Qwen publish it: e4m3 weights, one fp32 scale per 128 x 128 block.

`weight_scale_inv` is what a stored value is multiplied by: the block's largest magnitude / 448.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_rl.models.family import Family, ModelDescription
from megatron_rl.models.hf_config import JSON

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 128
DTYPE = "F8_E4M3"
LARGEST = 448.0  # that e4m3 holds
SCALE = "_scale_inv"  # appended to the weight's name


def scales_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    return -(-shape[0] // BLOCK), -(-shape[1] // BLOCK)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] of any float dtype -> e4m3 of the same shape, and fp32 scales of the blocks.

    Raises:
        ValueError: a value is not finite.
    """
    import torch

    rows, columns = weight.shape
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(scales_shape((rows, columns)), dtype=torch.float32)
    for index in range(scales.shape[0]):  # a row of blocks at a time: fp32 copies stay small
        part = weight[index * BLOCK : (index + 1) * BLOCK].float()
        padded = torch.zeros(BLOCK, scales.shape[1] * BLOCK)
        padded[: part.shape[0], :columns] = part
        blocks = padded.view(BLOCK, -1, BLOCK)
        scale = blocks.abs().amax(dim=(0, 2)) / LARGEST
        if not torch.isfinite(scale).all():
            raise ValueError("it has values that are not finite")
        scale[scale == 0] = 1.0
        scaled = (blocks / scale[None, :, None]).clamp(-LARGEST, LARGEST).view(BLOCK, -1)
        values[index * BLOCK : (index + 1) * BLOCK] = scaled[: part.shape[0], :columns].to(torch.float8_e4m3fn)
        scales[index] = scale
    return values, scales


def quantization_config(family: Family, description: ModelDescription) -> dict[str, JSON]:
    """The entry of config.json that transformers and vLLM read."""
    matrices = [rule for rule in family.weights(description) if rule.per_layer and len(rule.hf[0].shape) == 2]
    kept = [family.output, *(rule for rule in matrices if not rule.is_projection)]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [rule.hf[0].name.removesuffix(".weight") for rule in kept],
    }
