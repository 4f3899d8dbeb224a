"""What the stand-in's quantisers compute, against known values and the formats' precision; run with Transformer Engine."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.runtime import device
from tests.te.standin import quantize
from tests.te.standin.enums import DType

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2


def known_values() -> None:
    """Scales by hand: 448 is E4M3's largest number, 57,344 E5M2's."""
    amax = torch.tensor([3.5, 7.0, 0.0, float("inf"), 100.0])
    scale = quantize.scale_from_amax(amax, 448.0, False, 0.0, quantize._FP32_MAX)
    assert scale.tolist() == [128.0, 64.0, 1.0, 1.0, torch.tensor(448 / 100).item()]
    assert quantize.scale_from_amax(amax, 448.0, True, 0.0, 1.0).tolist() == [128.0, 64.0, 1.0, 1.0, 4.0]
    # E8M0: the power of two that takes amax to 448 or below, biased by 127.
    exponents = quantize.exponent_from_amax(torch.tensor([448.0, 449.0, 1.0, 0.0, 57344.0]), E4M3)
    assert exponents.tolist() == [127, 128, 127 - 8, 0, 127 + 7]
    assert quantize.cast(torch.tensor([1e9, -1e9, 17.0]), E4M3).view(torch.float8_e4m3fn).tolist() == [
        448.0,
        -448.0,
        16.0,
    ]
    history, delayed = torch.tensor([[1.0, 0.0], [14.0, 2.0]]), torch.ones(2)
    quantize.fused_amax_and_scale_update_after_reduction(torch.tensor([7.0, 0.0]), [history], [delayed], "max", E4M3, 0)
    assert delayed.tolist() == [32.0, 224.0]
    assert history.tolist() == [[0.0, 0.0], [7.0, 0.0]]


def precision() -> None:
    """Row-wise and column-wise data of every quantiser give the values back within half a unit of the format's last place."""
    from transformer_engine.pytorch import Float8Quantizer
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    with device.megatron():
        for dtype, half in ((E4M3, 2.0**-4), (E5M2, 2.0**-3)):
            both = {"rowwise": True, "columnwise": True}
            for quantizer in (
                Float8Quantizer(torch.tensor([16.0]), torch.zeros(1), dtype),
                Float8CurrentScalingQuantizer(dtype, torch.device("cpu")),
                Float8BlockQuantizer(dtype, **both, block_scaling_dim=1),
                Float8BlockQuantizer(dtype, **both, block_scaling_dim=2),
                Float8BlockQuantizer(dtype, **both, block_scaling_dim=1, force_pow_2_scales=False),
                MXFP8Quantizer(dtype),
            ):
                torch.manual_seed(0)
                values = torch.randn(160, 288) * torch.rand(160, 1).exp2()  # no multiples of 128
                tensor = quantizer(values)
                for columnwise in (False, True):
                    _check(quantize.operand(tensor, columnwise), values, half, quantizer)
                torch.testing.assert_close(tensor.dequantize(), quantize.operand(tensor, False), rtol=0, atol=0)
                own = [part for part in tensor.get_data_tensors() if part is not None]
                tensor.quantize_(values * 0.5)  # into the same memory
                assert [part.data_ptr() for part in own] == [
                    p.data_ptr() for p in tensor.get_data_tensors() if p is not None
                ]
                _check(quantize.operand(tensor, True), values * 0.5, half, quantizer)


def _check(found: Tensor, values: Tensor, half: float, quantizer: object) -> None:
    error, small = (found - values).abs(), 1e-3  # near 0 the numbers of the format are evenly spaced
    assert (error <= half * values.abs() + small).all(), (quantizer, error.max())
    assert error.max() > 0


def shards() -> None:
    """Weights cast in shards, as data-parallel ranks do it, are those cast whole."""
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    height, width, cut = 160, 256, 20_000
    values = torch.randn(height, width, generator=torch.Generator().manual_seed(0))
    with device.megatron():
        quantizer = Float8BlockQuantizer(E4M3, rowwise=True, columnwise=False)
        whole = quantizer(values)
    flat, shape = values.view(-1), quantizer.get_scale_shape(values.shape, False)
    parts = [(flat[:cut], 0), (flat[cut:], cut)]
    amaxes = [torch.zeros(shape) for _ in parts]
    for (part, start), amax in zip(parts, amaxes, strict=True):
        quantize.fp8_block_scaling_compute_partial_amax(part, amax, height, width, start, 128)
    amax, scale, inverse = torch.maximum(*amaxes), torch.empty(shape), torch.empty(shape)
    quantize.multi_tensor_compute_scale_and_scale_inv(0, torch.zeros(1), [[amax], [scale], [inverse]], 448.0, True, 0.0)
    data = torch.empty(height * width, dtype=torch.uint8)
    for part, start in parts:
        out = data[start : start + len(part)]
        quantize.fp8_block_scaling_partial_cast(part, out, scale, height, width, start, 128, E4M3)
    assert torch.equal(data.view(height, width), whole._rowwise_data)
    assert torch.equal(inverse[:, :2], whole._rowwise_scale_inv[:, :2])
