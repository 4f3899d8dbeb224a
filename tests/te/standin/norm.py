"""RMSNorm and LayerNorm, forward and backward, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.te.standin import quantize
from tests.te.standin.enums import DType, torch_type


def _finish(
    value: Tensor, out: Tensor | None, quantizer: quantize.Quantizer | None, otype: DType | torch.dtype
) -> Tensor:
    value = value.to(otype if isinstance(otype, torch.dtype) else torch_type(otype))
    if quantizer is not None:
        return quantize.quantize(value, quantizer, out)
    return value if out is None else out.copy_(value)


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Tensor | None,
    quantizer: quantize.Quantizer | None,
    otype: DType,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, None, Tensor]:
    """The output, no mean, and 1 / root mean square per row."""
    x = input.float()
    rsigma = torch.rsqrt(x.square().mean(-1) + eps)
    out = x * rsigma[..., None] * _gamma(weight, zero_centered_gamma)
    return _finish(out, ln_out, quantizer, otype), None, rsigma.flatten()


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of input and weight."""
    grad, normed = dz.float(), x.float() * rsigma.view(*x.shape[:-1], 1)
    scaled = grad * _gamma(gamma, zero_centered_gamma)
    dx = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * rsigma.view(*x.shape[:-1], 1)
    return dx.to(x.dtype), (grad * normed).flatten(0, -2).sum(0).to(gamma.dtype)


def layernorm_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    ln_out: Tensor | None,
    quantizer: quantize.Quantizer | None,
    otype: DType,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and mean and 1 / standard deviation per row."""
    x = input.float()
    mean, variance = x.mean(-1), x.var(-1, correction=0)
    rsigma = torch.rsqrt(variance + eps)
    out = (x - mean[..., None]) * rsigma[..., None] * _gamma(weight, zero_centered_gamma)
    if bias is not None:
        out = out + bias.float()
    return _finish(out, ln_out, quantizer, otype), mean.flatten(), rsigma.flatten()


def layernorm_bwd(
    dz: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of input, weight and bias."""
    rows = (*x.shape[:-1], 1)
    grad, normed = dz.float(), (x.float() - mu.view(rows)) * rsigma.view(rows)
    scaled = grad * _gamma(gamma, zero_centered_gamma)
    dx = scaled - scaled.mean(-1, keepdim=True) - normed * (scaled * normed).mean(-1, keepdim=True)
    dgamma, dbeta = (grad * normed).flatten(0, -2).sum(0), grad.flatten(0, -2).sum(0)
    return (dx * rsigma.view(rows)).to(x.dtype), dgamma.to(gamma.dtype), dbeta.to(gamma.dtype)
