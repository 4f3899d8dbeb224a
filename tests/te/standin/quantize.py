"""Quantised tensors: to and from FP8."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from transformer_engine.pytorch.quantized_tensor import Quantizer
else:
    Quantizer = object


def dequantize(tensor: Tensor, columnwise: bool = False) -> Tensor:
    """The values of a tensor; of a quantised one those of its column-wise data where asked. A plain one is returned."""
    return tensor


def quantize(tensor: Tensor, quantizer: Quantizer, output: Tensor | None = None, noop: Tensor | None = None) -> Tensor:
    """The quantised tensor, into `output` where given."""
    raise NotImplementedError("FP8")
