"""The router's scores and its choice."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.te.standin.enums import NVTERoutingMapFormat


def fused_topk_with_score_function_fwd(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
    routing_map_format: int = NVTERoutingMapFormat.BYTEMAP,
    topk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities (0 where not chosen), what is chosen, and the softmax for the backward pass; all [tokens, experts]."""
    if score_function != "softmax" or num_groups or group_topk or expert_bias is not None or topk_indices is not None:
        raise NotImplementedError("the stand-in's router has softmax scores, without groups, bias and indices")
    values = logits.float()
    chosen = torch.zeros_like(values, dtype=torch.bool).scatter(1, values.topk(topk, dim=1).indices, True)
    of = values if use_pre_softmax else values.masked_fill(~chosen, -torch.inf)
    softmax = of.softmax(dim=1)
    probs = softmax.masked_fill(~chosen, 0) * (scaling_factor or 1.0)
    return probs.to(logits.dtype), chosen, softmax.to(logits.dtype)


def fused_topk_with_score_function_bwd(
    routing_map: Tensor,
    intermediate_output: Tensor,
    grad_probs: Tensor,
    grad_logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    scaling_factor: float | None,
    score_function: str,
    use_dense_indices: bool = False,
    routing_map_format: int = NVTERoutingMapFormat.BYTEMAP,
) -> None:
    """The gradient of the logits, into `grad_logits`."""
    softmax = intermediate_output.float()
    grad = grad_probs.float().masked_fill(~routing_map, 0) * (scaling_factor or 1.0)
    grad_logits.copy_(softmax * (grad - (softmax * grad).sum(1, keepdim=True)))
