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
    """Probabilities (0 where not chosen), what is chosen, and the scores for the backward pass; all [tokens, experts].

    Groups and a bias go with sigmoid scores, as in DeepSeek-V3.
    """
    if topk_indices is not None or score_function not in ("softmax", "sigmoid"):
        raise NotImplementedError("the stand-in's router has softmax and sigmoid scores, without indices")
    values = logits.float()
    if score_function == "sigmoid":
        scores = values.sigmoid()
        chosen = _chosen(scores if expert_bias is None else scores + expert_bias, topk, num_groups, group_topk)
        kept = scores.masked_fill(~chosen, 0)
        probs = kept / (kept.sum(1, keepdim=True) + 1e-20) if topk > 1 else kept
        return (probs * (scaling_factor or 1.0)).to(logits.dtype), chosen, scores
    if num_groups or group_topk or expert_bias is not None:
        raise NotImplementedError("the stand-in's softmax router has no groups and no bias")
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
    if score_function == "sigmoid":
        scores = intermediate_output.float()
        grad = grad_probs.float().masked_fill(~routing_map, 0) * (scaling_factor or 1.0)
        if topk > 1:
            total = scores.masked_fill(~routing_map, 0).sum(1, keepdim=True) + 1e-20
            grad = grad / total - ((grad * scores).sum(1, keepdim=True) / total**2).masked_fill(~routing_map, 0)
        grad_logits.copy_(grad * scores * (1 - scores))
        return
    softmax = intermediate_output.float()
    grad = grad_probs.float().masked_fill(~routing_map, 0) * (scaling_factor or 1.0)
    grad_logits.copy_(softmax * (grad - (softmax * grad).sum(1, keepdim=True)))


def _chosen(scores: Tensor, topk: int, groups: int | None, group_topk: int | None) -> Tensor:
    """The highest scores of each token, within the groups whose best add up to most."""
    if groups and group_topk:
        grouped = scores.view(len(scores), groups, -1)
        best = grouped.topk(topk // group_topk, dim=2).values.sum(2)
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter(1, best.topk(group_topk, dim=1).indices, True)
        scores = grouped.masked_fill(~allowed[:, :, None], -torch.inf).flatten(1)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(topk, dim=1).indices, True)
