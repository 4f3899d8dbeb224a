"""Transformer Engine's matrix products in FP8, of which only the shapes count, beside `megatron_meta`. Written for
Megatron-Core 0.19.2 and Transformer Engine 2.20.2: `_Linear`, `_LayerNormLinear`, `_GroupedLinear`, `Fp8Padding`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.autograd.function import FunctionCtx

from megatron_rl.seams import check_parameters
from megatron_rl.seams.fp8_sizes import ROWS_OF_EXPERTS, input_bytes
from megatron_rl.seams.megatron import Chunk


class _Rows(torch.autograd.Function):
    """Other numbers of rows, with nothing kept: experts' tokens with what pads them, and without."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, rows: int) -> Tensor:
        ctx.like = x.shape  # type: ignore[attr-defined]
        return x.new_empty(rows, *x.shape[1:])

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].new_empty(ctx.like), None  # type: ignore[attr-defined]


@dataclass(frozen=True)
class InFP8:
    """How a matrix product in FP8 treats its input, of one group of rows or of one per expert."""

    recipe: str
    width: int  # of the output
    groups: tuple[int, ...] | None = None  # rows of each expert
    gathered: int = 1  # ranks whose rows are put together
    original: bool = False  # the input is kept as it comes
    trained: bool = True  # the weight: else no input is kept

    def bytes(self, x: Tensor, columnwise: bool, ranks: int = 1) -> Tensor:
        """`x` of so many ranks together, quantised in one direction; uint8."""
        columns = x.shape[-1]
        groups = self.groups or (x.numel() // columns * ranks,)
        return x.new_empty(
            sum(input_bytes(rows, columns, self.recipe, columnwise) for rows in groups), dtype=torch.uint8
        )


class QuantisedProduct(torch.autograd.Function):
    """A matrix product in FP8 keeps its input as the weight's gradient reads it; with sequence parallelism its own rows,
    and all rows are gathered in FP8 in both passes. The weight's copies in FP8 are not made here: they outlive the passes,
    and are counted apart.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor | None, bias: Tensor | None, how: InFP8) -> Tensor:
        by_rows = how.bytes(x, columnwise=False)
        by_columns = how.bytes(x, columnwise=True) if how.trained and not how.original else None
        whole = how.bytes(x, columnwise=False, ranks=how.gathered) if how.gathered > 1 else by_rows
        kept = x if how.original else by_columns
        ctx.save_for_backward(kept if how.trained else None, weight, bias)  # type: ignore[arg-type]
        ctx.how, ctx.like = how, x.shape  # type: ignore[attr-defined]
        output = x.new_empty(x.shape[0] * how.gathered, *x.shape[1:-1], how.width)
        del by_rows, whole
        return output

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        how, like, gradient = ctx.how, ctx.like, gradients[0]  # type: ignore[attr-defined]
        _, weight, bias = ctx.saved_tensors  # type: ignore[attr-defined]
        quantised = [how.bytes(gradient, columnwise) for columnwise in (False, True)]
        whole = gradient.new_empty(like[0] * how.gathered, *like[1:])
        read = how.bytes(whole, columnwise=True) if how.trained and (how.gathered > 1 or how.original) else None
        own = None if weight is None else torch.empty_like(weight)
        result = whole if how.gathered == 1 else gradient.new_empty(like)
        del quantised, read
        return result, own, None if bias is None else torch.empty_like(bias), None


def _product(recipe: str, original: bool) -> Callable[..., Tensor]:
    """Stands in the place of a parallel linear layer's `_forward_impl`."""

    def forward(
        input: Tensor, weight: Tensor, bias: Tensor | None, sequence_parallel: bool, tp_group: Any = None, **_: object
    ) -> Tensor:
        keeps = torch.is_grad_enabled() and weight.requires_grad
        gathered = tp_group.size() if sequence_parallel else 1
        how = InFP8(recipe, weight.shape[0], gathered=gathered, original=original, trained=keeps)
        return cast(Tensor, QuantisedProduct.apply(input, weight, bias, how))

    return forward


def padded(recipe: str) -> Callable[[Tensor, list[int]], tuple[Tensor, list[int]]]:
    """Transformer Engine's padding of experts' rows."""
    multiple = ROWS_OF_EXPERTS[recipe]

    def pad(x: Tensor, rows: list[int]) -> tuple[Tensor, list[int]]:
        padded = [-(-count // multiple) * multiple for count in rows]
        return (x, rows) if padded == rows else (cast(Tensor, _Rows.apply(x, sum(padded))), padded)

    return pad


def unpadded(x: Tensor, rows: list[int]) -> Tensor:
    return x if len(x) == sum(rows) else cast(Tensor, _Rows.apply(x, sum(rows)))


def quantised_layers(chunks: Sequence[Chunk], bf16_ends: int) -> list[Any]:
    """The decoder's layers whose matrix products are in FP8: without so many of the model's first and of its last."""
    layers: list[Any] = [layer for chunk in chunks for layer in chunk.decoder.layers]
    return [layer for layer in layers if bf16_ends < layer.layer_number <= layer.config.num_layers - bf16_ends]


def quantised_weights(layers: Sequence[Any]) -> list[Tensor]:
    """The matrices that products in FP8 read."""
    linear = (ColumnParallelLinear, RowParallelLinear)
    return [module.weight for layer in layers for module in layer.modules() if isinstance(module, linear)]


def quantise(layers: Sequence[Any], recipe: str) -> None:
    """Makes attention and feed-forwards of these layers compute in FP8. As Megatron-Core has it, the product after attention
    keeps the output that attention itself keeps, where the recipe allows it."""
    for layer in layers:
        attention, mlp = layer.self_attention, layer.mlp
        products = [(attention.linear_qkv, False), (attention.linear_proj, recipe != "delayed")]
        if hasattr(mlp, "linear_fc1"):
            products += [(mlp.linear_fc1, False), (mlp.linear_fc2, False)]
        for module, original in products:
            check_parameters(type(module)._forward_impl, "self input weight args kwargs")
            module._forward_impl = _product(recipe, original)
