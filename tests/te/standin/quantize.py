"""FP8 for the stand-in: `transformer_engine_torch`'s quantisers and their inverses, by torch's float8 types.

The semantics are those of Transformer Engine's `csrc/quantizer.cpp`, `common/recipe/recipe_common.cuh` and
`common/util/ptx.cuh`, the layouts those that its Python reads: row-wise data [rows, columns]; column-wise data transposed
[columns, rows], but for MXFP8, which keeps [rows, columns] with blocks along the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.te.standin.enums import DType, torch_type

if TYPE_CHECKING:
    from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage, Quantizer

    Quantized = Tensor | QuantizedTensorStorage

BLOCK, MX_BLOCK = 128, 32

_FP32_MAX = torch.finfo(torch.float32).max


# ---------------------------------------------------------------------------------------------------- scales and casts
def cast(values: Tensor, dtype: DType) -> Tensor:
    """float32 -> bytes of the FP8 numbers nearest to it, saturating; NaN stays."""
    fp8 = torch_type(dtype)
    largest = torch.finfo(fp8).max
    return values.clamp(-largest, largest).to(fp8).view(torch.uint8)


def scale_from_amax(amax: Tensor, largest: float, power_of_two: bool, epsilon: float, infinite: float) -> Tensor:
    """float32 amax -> the factor that takes it to the format's largest number; 1 for amax of zero, infinity and NaN."""
    amax = torch.where(amax < epsilon, epsilon, amax)
    scale = largest / amax
    scale = torch.where(torch.isinf(scale), infinite, scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & -0x00800000).view(torch.float32)  # 0xFF800000: sign and exponent
    return torch.where((amax == 0) | ~torch.isfinite(amax), 1.0, scale)


def exponent_from_amax(amax: Tensor, dtype: DType) -> Tensor:
    """amax -> E8M0 byte: the smallest power of two (biased by 127) that takes it below the format's largest number."""
    value = amax.float() * (1 / torch.finfo(torch_type(dtype)).max)
    bits = value.view(torch.int32)
    exponent, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= 0x400000))
    exponent = torch.where(torch.isinf(value), 254, exponent + up.int())
    return torch.where(torch.isnan(value), 255, exponent).to(torch.uint8)


def _spread(scales: Tensor, along: int, block: int, size: int) -> Tensor:
    """One number per block of `block` along a dimension -> one per element."""
    return scales.repeat_interleave(block, along).narrow(along, 0, size)


def _tiles(values: Tensor, height: int, width: int) -> Tensor:
    """[rows, columns] -> the largest absolute value of each tile [ceil(rows / height), ceil(columns / width)]."""
    rows, columns = values.shape
    padded = F.pad(values.abs(), (0, -columns % width, 0, -rows % height))
    return padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width).amax((1, 3))


def _padded(scales: Tensor, shape: Sequence[int]) -> Tensor:
    return F.pad(scales, (0, shape[1] - scales.shape[1], 0, shape[0] - scales.shape[0]))


# ------------------------------------------------------------------------------------------------------- the quantisers
# Each: float32 [rows, columns], its shape before flattening, quantiser, input's dtype -> the attributes of the FP8 tensor.
def _per_tensor(values: Tensor, shape: torch.Size, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, object]:
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    amax = values.abs().max()[None]
    if type(quantizer).__name__ == "Float8CurrentScalingQuantizer":
        if quantizer.with_amax_reduction:
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, quantizer.amax_reduction_group)
        largest = torch.finfo(torch_type(quantizer.dtype)).max
        scale = scale_from_amax(amax, largest, quantizer.force_pow_2_scales, quantizer.amax_epsilon, _FP32_MAX)
    else:
        scale = quantizer.scale
        if quantizer.amax.numel():
            quantizer.amax.copy_(torch.maximum(quantizer.amax, amax))
    data = cast(values * scale, quantizer.dtype)
    either = is_non_tn_fp8_gemm_supported()  # the GEMM reads row-wise data in both directions
    transpose = quantizer.columnwise_usage and not either
    return {
        "_data": data.view(shape) if quantizer.rowwise_usage or either else None,
        "_transpose": data.t().reshape(shape[-1], *shape[:-1]) if transpose else None,
        "_transpose_invalid": not transpose,
        "_scale_inv": 1 / scale,
    }


def _blockwise(values: Tensor, shape: torch.Size, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, object]:
    height = BLOCK if quantizer.block_scaling_dim == 2 else 1
    found: dict[str, object] = {}
    for name, wanted, columnwise in (
        ("rowwise", quantizer.rowwise_usage, False),
        ("columnwise", quantizer.columnwise_usage, True),
    ):
        if not wanted:
            found |= {f"_{name}_data": None, f"_{name}_scale_inv": None}
            continue
        matrix = values.t() if columnwise else values
        largest, infinite = torch.finfo(torch_type(quantizer.dtype)).max, torch.finfo(dtype).max
        tiles = _tiles(matrix, height, BLOCK)
        scales = scale_from_amax(tiles, largest, quantizer.force_pow_2_scales, quantizer.amax_epsilon, infinite)
        data = cast(
            matrix * _spread(_spread(scales, 0, height, matrix.shape[0]), 1, BLOCK, matrix.shape[1]), quantizer.dtype
        )
        inverse = 1 / scales
        if height == 1:
            inverse = inverse.t()
        data = data.reshape(shape[-1], *shape[:-1]) if columnwise else data.view(shape)
        found |= {
            f"_{name}_data": data,
            f"_{name}_scale_inv": _padded(inverse, quantizer.get_scale_shape(shape, columnwise)),
        }
    return found


def _mxfp8(values: Tensor, shape: torch.Size, quantizer: Quantizer, dtype: torch.dtype) -> dict[str, object]:
    if any(size % MX_BLOCK for size in values.shape):
        raise ValueError(f"MXFP8 requires tensor dims that are divisible by {MX_BLOCK} (got shape={tuple(shape)})")
    found: dict[str, object] = {}
    for name, wanted, along in (("rowwise", quantizer.rowwise_usage, 1), ("columnwise", quantizer.columnwise_usage, 0)):
        if not wanted:
            found |= {f"_{name}_data": None, f"_{name}_scale_inv": None}
            continue
        tiles = _tiles(values, *((1, MX_BLOCK) if along else (MX_BLOCK, 1)))
        exponents = exponent_from_amax(tiles, quantizer.dtype)
        scales = _spread(_mx_factor(exponents), along, MX_BLOCK, values.shape[along])
        multiples = (128, 4) if along else (4, 128)
        padded = [-(-size // multiple) * multiple for size, multiple in zip(exponents.shape, multiples, strict=True)]
        found |= {
            f"_{name}_data": cast(values * scales, quantizer.dtype).view(shape),
            f"_{name}_scale_inv": _padded(exponents, padded),
        }
    return found


def _mx_factor(exponents: Tensor) -> Tensor:
    """The factor that quantises, of an E8M0 byte: 2 ** (127 - byte), and 1 for 0."""
    return torch.where(exponents == 0, 1.0, torch.exp2(127.0 - exponents.float()))


_KINDS: dict[str, Callable[[Tensor, torch.Size, Quantizer, torch.dtype], dict[str, object]]] = {
    "Float8Quantizer": _per_tensor,
    "Float8CurrentScalingQuantizer": _per_tensor,
    "Float8BlockQuantizer": _blockwise,
    "MXFP8Quantizer": _mxfp8,
}


def create_empty_quantized_tensor(
    quantizer: Quantizer, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin_memory: bool
) -> Quantized:
    """Storage without content, by what Transformer Engine's Python says; delayed scaling has that of current scaling."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

    says = Float8CurrentScalingQuantizer if isinstance(quantizer, Float8Quantizer) else type(quantizer)
    inner = says.inner_tensor_specs(quantizer, tuple(shape))
    tensors = {name: torch.empty(size, dtype=kind, device=device) for name, (size, kind) in inner.items()}
    metadata = says.storage_metadata(quantizer, dtype)
    context = {"is_tensor": not quantizer.internal, "requires_grad": False, **metadata}
    return metadata["cls"].__tensor_unflatten__(tensors, context, tuple(shape), None)


def quantize(
    tensor: Tensor, quantizer: Quantizer, output: Quantized | None = None, noop: Tensor | None = None
) -> Quantized:
    """Into `output`'s own storage where it has one (parameters lie in flat buffers); left alone where `noop` is 1."""
    if output is not None and noop is not None and noop.item() == 1:
        return output
    if output is None:
        output = quantizer.make_empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if not tensor.numel():
        return output
    values = tensor.detach().float().reshape(-1, tensor.shape[-1])
    for name, value in _KINDS[type(quantizer).__name__](values, tensor.shape, quantizer, tensor.dtype).items():
        kept = getattr(output, name)
        if isinstance(kept, Tensor) and isinstance(value, Tensor):
            kept.copy_(value.view(kept.shape))
        else:
            setattr(output, name, value)
    return output


def split_quantize(
    tensor: Tensor, sections: Sequence[int], quantizers: Sequence[Quantizer], disable_bulk_allocation: bool = False
) -> list[Quantized]:
    """Rows in parts, each by its own quantiser."""
    return [quantize(part, quantizer) for part, quantizer in zip(tensor.split(list(sections)), quantizers, strict=True)]


def bgrad_quantize(grad: Tensor, quantizer: Quantizer | None) -> tuple[Tensor, Quantized]:
    """(gradient of the bias, quantised gradient)."""
    bias = grad.reshape(-1, grad.shape[-1]).sum(0)
    return bias, grad if quantizer is None else quantize(grad, quantizer)


# --------------------------------------------------------------------------------------------------------- the inverses
def operand(tensor: Quantized, columnwise: bool) -> Tensor:
    """What a GEMM reads of an operand: a plain tensor as it is, an FP8 one as float32, from the data of this direction.

    A GEMM that contracts over the last dimension reads row-wise data, one that contracts over the others column-wise data.

    Raises:
        ValueError: the data of this direction is missing, or its sizes are none that cuBLAS takes.
    """
    if not _is_fp8(tensor):
        return tensor
    values = _read(tensor, columnwise)
    rows, columns = values.shape
    contracted, other = (rows, columns) if columnwise else (columns, rows)
    if contracted % 16 or (hasattr(tensor, "_is_2D_scaled") and other % 8):
        raise ValueError(f"FP8 GEMM of an operand of {rows} x {columns}, contracted over {contracted}: caller must pad")
    return values if columnwise else values.view(tensor.size())


def _is_fp8(tensor: Quantized) -> bool:
    from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage

    return isinstance(tensor, QuantizedTensorStorage)


def _read(tensor: Quantized, columnwise: bool) -> Tensor:
    """float32 [rows, columns]."""
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    def numbers(data: Tensor | None, transposed: bool) -> Tensor:
        if data is None:
            raise ValueError(f"{type(tensor).__name__} has no {'column' if columnwise else 'row'}-wise data")
        rows = 1 if transposed else data.dim() - 1
        shape = (data.shape[:rows].numel(), data.shape[rows:].numel())
        return data.view(torch_type(tensor._fp8_dtype)).float().view(shape)

    if hasattr(tensor, "_scale_inv"):
        if not columnwise or is_non_tn_fp8_gemm_supported():
            return numbers(tensor._data, False) * tensor._scale_inv
        if tensor._transpose_invalid:
            raise ValueError("the FP8 transpose is out of date")
        return numbers(tensor._transpose, True).t() * tensor._scale_inv
    data = tensor._columnwise_data if columnwise else tensor._rowwise_data
    scales = tensor._columnwise_scale_inv if columnwise else tensor._rowwise_scale_inv
    if not hasattr(tensor, "_is_2D_scaled"):  # MXFP8
        values = numbers(data, False)
        along, used = (0, scales[:, : values.shape[1]]) if columnwise else (1, scales[: values.shape[0]])
        return values * _spread(1 / _mx_factor(used), along, MX_BLOCK, values.shape[along])
    values = numbers(data, columnwise)
    height, width = values.shape
    inverse = _spread(scales, 0, BLOCK, height) if tensor._is_2D_scaled else scales[:, :height].t()
    values = values * _spread(inverse[:, : math.ceil(width / BLOCK)], 1, BLOCK, width)
    return values.t() if columnwise else values


def dequantize(input: Quantized, otype: DType) -> Tensor:
    """An FP8 tensor in a plain dtype and its own shape, from row-wise data where it has some."""
    rowwise = input._data if hasattr(input, "_scale_inv") else input._rowwise_data
    return _read(input, rowwise is None).to(torch_type(otype)).reshape(input.size())


def swap_first_dims(tensor: Tensor, *, out: Tensor | None = None) -> Tensor:
    """[a, b, ...] -> [b, a, ...]."""
    swapped = tensor.transpose(0, 1)
    return swapped.contiguous() if out is None else out.copy_(swapped)


def fp8_transpose(input: Tensor, dtype: DType, *, out: Tensor | None = None) -> Tensor:
    """Bytes [..., columns] -> [columns, ...]."""
    transposed = input.reshape(-1, input.shape[-1]).t().reshape(input.shape[-1], *input.shape[:-1])
    return transposed.contiguous() if out is None else out.copy_(transposed.view(out.shape))


# ------------------------------------------------------------------------------- delayed scaling; FP8 weights in shards
def compute_amax(tensor: Tensor, amax: Tensor) -> None:
    amax.copy_(tensor.abs().max())


def fused_amax_and_scale_update_after_reduction(
    reduced: Tensor, histories: Sequence[Tensor], scales: Sequence[Tensor], algorithm: str, dtype: DType, margin: float
) -> None:
    """Delayed scaling: the newest amax enters each history [length, tensors] and the scales follow; row 0 is cleared."""
    largest = torch.finfo(torch_type(dtype)).max
    for newest, history, scale in zip(reduced.split([len(s) for s in scales]), histories, scales, strict=True):
        history[0] = newest
        amax = history.amax(0) if algorithm == "max" else newest
        found = largest / amax / 2**margin
        found = torch.where((amax > 0) & torch.isfinite(amax), found, scale)
        scale.copy_(torch.where(torch.isinf(found), _FP32_MAX, found))
        history.copy_(history.roll(-1, 0))
        history[0] = 0


def multi_tensor_compute_scale_and_scale_inv(
    chunk: int, noop: Tensor, lists: Sequence[Sequence[Tensor]], largest: float, power_of_two: bool, epsilon: float
) -> None:
    for amax, scale, inverse in zip(*lists, strict=True):
        scale.copy_(scale_from_amax(amax, largest, power_of_two, epsilon, _FP32_MAX))
        inverse.copy_(1 / scale)


def multi_tensor_compute_scale_inv_e8m0(chunk: int, noop: None, lists: Sequence[Sequence[Tensor]]) -> None:
    for amax, inverse in zip(*lists, strict=True):
        inverse.copy_(exponent_from_amax(amax, DType.kFloat8E4M3))


def _whole(shard: Tensor, height: int, width: int, start: int) -> Tensor:
    """A flat shard at its place among zeros, float32 [height, width]."""
    flat = torch.zeros(height * width)
    flat[start : start + shard.numel()] = shard.float()
    return flat.view(height, width)


def fp8_block_scaling_compute_partial_amax(
    tensor: Tensor, amax: Tensor, height: int, width: int, start: int, block: int
) -> None:
    """amax [ceil(height / 128), padded] of the flat shard that begins at `start` of a weight [height, width]."""
    amax.copy_(_padded(_tiles(_whole(tensor, height, width, start), block, block), amax.shape))


def fp8_block_scaling_partial_cast(
    shard: Tensor, out: Tensor, scale: Tensor, height: int, width: int, start: int, block: int, dtype: DType
) -> None:
    scales = _spread(_spread(scale, 0, block, height), 1, block, width)
    out.copy_(cast(_whole(shard, height, width, start) * scales, dtype).view(-1)[start : start + shard.numel()])


def mxfp8_scaling_compute_partial_amax(
    shard: Tensor, amax_rowwise: Tensor, amax_columnwise: Tensor, rows: int, columns: int, start: int
) -> None:
    whole = _whole(shard, rows, columns, start)
    amax_rowwise.copy_(_padded(_tiles(whole, 1, MX_BLOCK), amax_rowwise.shape))
    amax_columnwise.copy_(_padded(_tiles(whole, MX_BLOCK, 1), amax_columnwise.shape))


def mxfp8_scaling_partial_cast(
    shard: Tensor,
    out_rowwise: Tensor,
    out_columnwise: Tensor,
    exponents_rowwise: Tensor,
    exponents_columnwise: Tensor,
    rows: int,
    columns: int,
    start: int,
) -> None:
    whole = _whole(shard, rows, columns, start)
    for out, exponents, along in ((out_rowwise, exponents_rowwise, 1), (out_columnwise, exponents_columnwise, 0)):
        used = exponents[:rows, : columns // MX_BLOCK] if along else exponents[: rows // MX_BLOCK, :columns]
        scaled = whole * _spread(_mx_factor(used), along, MX_BLOCK, whole.shape[along])
        out.copy_(cast(scaled, DType.kFloat8E4M3).view(-1)[start : start + shard.numel()])
