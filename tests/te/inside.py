"""What one process with Transformer Engine computes in the tests of this folder."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_rl.runtime import device


def layer_norm_linear() -> None:
    """Transformer Engine's fused module against torch's functions: output and gradients."""
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for normalization in ("RMSNorm", "LayerNorm"):
            with device.megatron():
                module = te.LayerNormLinear(32, 48, normalization=normalization, params_dtype=dtype, device="cpu")
                x = torch.randn(10, 32, dtype=dtype, requires_grad=True)
                out = module(x)
                torch.autograd.backward(out.float().square().sum())
            own = {name: parameter.detach().clone().requires_grad_() for name, parameter in module.named_parameters()}
            same, gamma = x.detach().clone().requires_grad_(), own["layer_norm_weight"]
            if normalization == "RMSNorm":
                normed = F.rms_norm(same, (32,), gamma, 1e-5)
            else:
                normed = F.layer_norm(same, (32,), gamma, own["layer_norm_bias"], 1e-5)
            want = F.linear(normed, own["weight"], own["bias"])
            want.float().square().sum().backward()
            close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-1}
            torch.testing.assert_close(out, want, **close)
            torch.testing.assert_close(x.grad, same.grad, **close)
            for name, parameter in module.named_parameters():
                torch.testing.assert_close(parameter.grad, own[name].grad, **close)
