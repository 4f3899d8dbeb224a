"""Megatron-Core's matrix products, exact: the forward pass is `base.exact_rows`'s. Written for 0.19.2."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from megatron_rl.base import exact_rows as exact
from megatron_rl.seams import check_parameters

IMPLEMENTATION = "self input weight args kwargs"


def make_products_exact(chunk: nn.Module) -> None:
    """From here on the linear layers of a chunk compute with `exact.linear`."""
    for layer in chunk.modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            check_parameters(type(layer)._forward_impl, IMPLEMENTATION)
            layer._forward_impl = _linear


def make_experts_exact(chunk: nn.Module) -> None:
    """Gives mixtures of experts, each whole on its rank, `exact.route`, and adds experts in their order."""
    for layer in chunk.modules():
        if isinstance(layer, MoELayer):
            check_parameters(layer.router.gating, "input")
            check_parameters(layer.router.routing, "logits padding_mask")
            check_parameters(layer.forward, "hidden_states intermediate_tensors padding_mask")
            layer.router.gating = partial(_gate, layer.router)
            layer.router.routing = partial(_route, layer.router)
            layer.forward = partial(_mix, layer)


def _gate(router: TopKRouter, x: Tensor) -> Tensor:
    return _Linear.apply(x.float(), router.weight.float(), None, None)


def _route(router: TopKRouter, logits: Tensor, padding_mask: None = None) -> tuple[Tensor, Tensor]:
    """Returns weights and choices of all experts: float32 and bool [tokens, experts]."""
    logits = logits.view(-1, logits.shape[-1])
    weights, experts = exact.route(logits, router.topk, router.config.moe_router_pre_softmax)
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, experts, True)
    return torch.zeros_like(logits).scatter(1, experts, weights), chosen


def _mix(layer: MoELayer, hidden: Tensor, *_: None, padding_mask: None = None) -> tuple[Tensor, None]:
    weights, chosen = layer.router(hidden)
    x = hidden.view(-1, hidden.shape[-1])
    tokens = [rows.nonzero()[:, 0] for rows in chosen.t()]
    outputs = [
        expert(x[rows], weights[rows, number])[0]
        for number, (expert, rows) in enumerate(zip(layer.experts.local_experts, tokens, strict=True))
    ]
    out = torch.zeros_like(x)
    for rows, of_expert in zip(tokens, outputs, strict=True):
        out = exact.add_expert(out, rows, of_expert)
    return out.view(hidden.shape), None


def _linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: dist.ProcessGroup,
    **_: object,
) -> Tensor:
    """Computes what Megatron's layers ask for where no kernels are fused."""
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
    return _Linear.apply(input, weight, bias, tp_group if allreduce_dgrad else None)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return exact.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = grad.matmul(weight)
        if ctx.group is not None:
            dist.all_reduce(of_x, group=ctx.group)
        rows = grad.reshape(-1, grad.shape[-1])
        of_weight = rows.t().matmul(x.reshape(-1, x.shape[-1])) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, rows.sum(dim=0) if ctx.needs_input_grad[2] else None, None
