"""Megatron-Core's gated-delta layers, which call three kernels of `fla` by names of their modules and refuse to be made
without it. Written for 0.19.2.

Three more things are mended. Weights that are gathered while others are computed are waited for as a module is called, and
the convolution's are read without a call of it. Tensor-parallel ranks norm the outputs of their own heads by the same weight,
whose gradient Megatron-Core sums over them with sequence parallelism only. And the decay is exp(A_log) in the parameters'
dtype there, while transformers and vLLM take it in fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, common, gdn
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor

Kernel = Callable[..., object]


def use_without_fla(convolution: Kernel, rule: Kernel, norm: Kernel) -> None:
    """Puts these functions in the places of `fla`'s kernels where it is not installed."""
    if common.HAVE_FLA:
        return
    common.HAVE_FLA = True
    common.l2norm = norm
    gdn.causal_conv1d = convolution
    gdn.chunk_gated_delta_rule = rule


class GatedDeltaLayer(GatedDeltaNet):
    """Megatron-Core's, its weights waited for, its gradients and its decay mended."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        if self.tp_size > 1 and not self.config.sequence_parallel:
            self.out_norm.weight.register_hook(self._summed)

    def forward(self, *args: object, **options: object) -> tuple[Tensor, Tensor | None]:
        for wait in self.conv1d._forward_pre_hooks.values():
            wait(self.conv1d, ())
        output: tuple[Tensor, Tensor | None] = super().forward(*args, **options)
        return output

    def _summed(self, gradient: Tensor) -> Tensor:
        return reduce_from_tensor_model_parallel_region(gradient, group=self.tp_group)

    def _compute_g_and_beta(
        self, A_log_local_cp: Tensor, dt_bias_local_cp: Tensor, alpha: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logarithms of the decay, fp32, and the step sizes."""
        decay = -A_log_local_cp.float().exp() * F.softplus(alpha.float() + dt_bias_local_cp.float())
        return decay, torch.sigmoid(beta)
