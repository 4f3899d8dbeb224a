"""Megatron-Core's plain layers as Transformer Engine's, of whose kernels only the shapes count: what they give out, and what
they keep for the backward pass. Written for Megatron-Core 0.19.2 and Transformer Engine 2.20.2.

No numbers are computed. `tests/te` holds what is kept here to what Transformer Engine's own modules keep.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from copy import copy
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from megatron_rl.seams import replaced
from megatron_rl.seams.megatron import Chunk
from megatron_rl.seams.meta_fp8 import InFP8, QuantisedProduct, padded, quantise, quantised_layers, unpadded


def under_way(stage: int, stages: int, chunks: int) -> list[int]:
    """The model chunks of a pipeline stage that have computed a micro-batch forwards, in that order, when the stage begins
    to take one forwards and one backwards in turn; of a step with more micro-batches than that."""
    many = 4 * stages  # of each chunk
    group = SimpleNamespace(size=lambda: stages, rank=lambda: stage)
    virtual = chunks if chunks > 1 else None
    communicator = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=virtual)
    _, _, warm_up, _ = get_pp_rank_microbatches(many, chunks, stages, p2p_communicator=communicator)
    return [chunk for _, chunk in get_schedule_table(many, chunks, stages)[:warm_up]]


class FusedAttention(torch.autograd.Function):
    """Flash attention keeps query, key, value, output, and a float32 number per token and head; views it copies first."""

    @staticmethod
    def forward(ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        output = torch.empty_like(query)
        statistics = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, output, statistics)
        return output

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, _ = ctx.saved_tensors  # type: ignore[attr-defined]
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _Window(FusedAttention):
    """torch's fused attention: [sequences, heads, tokens, d]. Keeps views as they are."""

    @staticmethod
    def forward(ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query.transpose(1, 2)).transpose(1, 2)
        statistics = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, output, statistics)
        return output


def _window(query: Tensor, key: Tensor, value: Tensor, **_: object) -> Tensor:
    return cast(Tensor, _Window.apply(query, key, value))


class _DeltaRule(torch.autograd.Function):
    """fla's kernel keeps what it reads, and of every token and head a row of the 64 x 64 products within its chunk."""

    @staticmethod
    def forward(ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value, g, beta, key.new_empty(*key.shape[:3], 64))
        return torch.empty_like(value)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:5])  # type: ignore[attr-defined]


def _delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: object) -> tuple[Tensor, None]:
    return cast(Tensor, _DeltaRule.apply(query, key, value, g, beta)), None


class Norm(torch.autograd.Function):
    """RMSNorm keeps its input (of a view a copy), its weight, and a float32 number per row."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors  # type: ignore[attr-defined]
        return torch.empty_like(x), torch.empty_like(weight)


class _Same(torch.autograd.Function):
    """A module that keeps nothing and gives out tensors like those it takes: rotary embeddings, rows in another order."""

    @staticmethod
    def forward(ctx: FunctionCtx, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in tensors)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(gradient) for gradient in gradients)


class _Kept(torch.autograd.Function):
    """Kernels that keep their input alone: gated-delta layers', and grouped products, which give out another `width` and
    whose weights' gradients are added to the fp32 sums."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, width: int) -> Tensor:
        ctx.save_for_backward(x)
        return x.new_empty(*x.shape[:-1], width)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        return torch.empty_like(ctx.saved_tensors[0]), None  # type: ignore[attr-defined]


class _AsModule(nn.Module):
    """A function in a place where Megatron-Core wants a module."""

    def __init__(self, compute: Callable[..., tuple[Tensor, None]]) -> None:
        super().__init__()
        self.forward = compute


class _Permuted(torch.autograd.Function):
    """Tokens in the order of their experts keep an int32 map [tokens, 2 experts + 1]."""

    @staticmethod
    def forward(ctx: FunctionCtx, tokens: Tensor, probs: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        places = probs.new_empty(len(probs), 2 * probs.shape[1] + 1, dtype=torch.int32)
        ctx.save_for_backward(places)
        ctx.like = [(part.shape, part.dtype, part.device) for part in (tokens, probs)]  # type: ignore[attr-defined]
        ctx.mark_non_differentiable(places)
        return tokens.new_empty(rows, tokens.shape[1]), probs.new_empty(rows), places

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        like = ctx.like  # type: ignore[attr-defined]
        first, second = (torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in like)
        return first, second, None


class _Unpermuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
        ctx.save_for_backward(places)
        ctx.rows = rows.shape  # type: ignore[attr-defined]
        return rows.new_empty(shape)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].new_empty(ctx.rows), None, None  # type: ignore[attr-defined]


def _permute(tokens: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    return cast(tuple[Tensor, Tensor, Tensor], _Permuted.apply(tokens, probs, num_out_tokens))


def _unpermute(
    rows: Tensor,
    places: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | None = None,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    return _Unpermuted.apply(rows, places, restore_shape)


# What Megatron-Core's modules call of Transformer Engine's, by their names there; tests/seams holds each to the calls.
ENGINES: dict[str, dict[str, object]] = {
    "megatron.core.transformer.moe.moe_utils": {
        "HAVE_TE": True,
        "fused_permute_with_probs": _permute,
        "fused_unpermute": _unpermute,
        "fused_sort_chunks_by_index": lambda rows, sizes, order: _Same.apply(rows)[0],
        "fused_sort_chunks_by_index_with_probs": lambda rows, probs, sizes, order: _Same.apply(rows, probs),
    },
    "megatron.core.models.common.embeddings.rope_utils": {
        "fused_apply_rotary_pos_emb_thd": lambda t, *_, **__: _Same.apply(t)[0],
    },
    "megatron.core.ssm.gated_delta_net.gdn": {"causal_conv1d": lambda x, **_: (_Kept.apply(x, x.shape[-1]), None)},
    "megatron.core.ssm.gated_delta_net.common": {"l2norm": lambda x, **_: _Kept.apply(x, x.shape[-1])},
    "megatron.core.tensor_parallel.random": {
        "FP8GlobalStateManager": SimpleNamespace(is_fp8_enabled=lambda: False),
        "fp8_autocast": lambda *, enabled, fp8_recipe: contextlib.nullcontext(),
        "activation_recompute_forward": lambda *, activation_recompute, recompute_phase: contextlib.nullcontext(),
    },
}


def _grouped(
    activation_recomputed: bool, recipe: str | None, exact: Container[int]
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """`TEGroupedMLP.forward` itself, over products without weights, for Megatron-Core's experts one after the other: in FP8
    where there is a `recipe`, but for those whose `id` is in `exact`."""

    def product(weight: Tensor, recipe: str | None, original: bool = False) -> nn.Module:
        def compute(x: Tensor, splits: Sequence[int]) -> tuple[Tensor, None]:
            if recipe is None:
                return _Kept.apply(x, weight.shape[0]), None
            keeps = torch.is_grad_enabled() and weight.requires_grad
            how = InFP8(recipe, weight.shape[0], tuple(splits), original=original, trained=keeps)
            return QuantisedProduct.apply(x, None, None, how), None

        return _AsModule(compute)

    def forward(
        self: SequentialMLP, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        one, own, config = self.local_experts[0], None if id(self) in exact else recipe, copy(self.config)
        config.fp8 = recipe  # has rows padded, of layers in bf16 too
        grouped = SimpleNamespace(
            config=config,
            linear_fc1=product(one.linear_fc1.weight, own),
            linear_fc2=product(one.linear_fc2.weight, own, activation_recomputed),
            quantization_padding=padded(recipe) if recipe else None,
            quantization_unpadding=unpadded,
            activation_func=self.config.activation_func,
            activation_recompute=activation_recomputed,
            offload_expert_fc1=False,
            offload_moe_act=False,
            _with_fused_impl=False,
            _apply_bias=TEGroupedMLP._apply_bias,
        )
        return cast(tuple[Tensor, Tensor | None], TEGroupedMLP.forward(grouped, tokens, tokens_per_expert, probs))

    return forward


def _normed(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: cast(Tensor, Norm.apply(x, weight))


def _normed_inside(norm: nn.Module, product: nn.Module) -> None:
    """Makes `product` norm its own input, as Transformer Engine's fused module does: who computes it again, computes both."""
    compute = norm.forward
    norm.forward = lambda x: x
    product.register_forward_pre_hook(lambda _, given: (compute(given[0]), *given[1:]))


@contextlib.contextmanager
def fused_kernels(
    chunks: Sequence[Chunk],
    attention: type[nn.Module],
    norm: type[nn.Module],
    activation_recomputed: bool,
    recipe: str | None = None,
    bf16_ends: int = 0,
) -> Iterator[None]:
    """Attention, norms, rotary embeddings, SwiGLU, the tokens' way to their experts and back, and the experts, for chunks
    that are used nowhere else. `attention`, `norm`: the classes of the plain layers. `activation_recomputed`: the experts'
    (`moe_act`). `recipe`: of products in FP8."""

    def halves(y: Tensor) -> Tensor:
        return y.new_empty(*y.shape[:-1], y.shape[-1] // 2)

    for config in _configs(chunks):
        config.moe_permute_fusion = True
        config.apply_rope_fusion = not config.multi_latent_attention  # as in `actor.build`
        config.bias_activation_fusion = config.activation_func is torch.nn.functional.silu
    layers: list[Any] = [layer for chunk in chunks for layer in chunk.decoder.layers]
    in_fp8 = [] if recipe is None else quantised_layers(chunks, bf16_ends)
    if recipe is not None:
        quantise(in_fp8, recipe)
    exact = {id(getattr(layer.mlp, "experts", None)) for layer in layers if layer not in in_fp8}
    for plain in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(plain, attention):
            plain.forward = lambda query, key, value, *_, **__: FusedAttention.apply(query, key, value)
        elif isinstance(plain, norm):
            plain.forward = _normed(cast(Tensor, plain.weight))
    for layer in layers:
        attention_block = layer.self_attention
        if layer.config.multi_latent_attention:
            _normed_inside(attention_block.q_layernorm, attention_block.linear_q_up_proj)
            _normed_inside(attention_block.kv_layernorm, attention_block.linear_kv_up_proj)
        else:
            is_delta = hasattr(attention_block, "in_proj")
            _normed_inside(layer.input_layernorm, attention_block.in_proj if is_delta else attention_block.linear_qkv)
            if is_delta:
                attention_block.gated_delta_rule = _delta_rule
            layer.recompute_input_layernorm = False
        if hasattr(layer.mlp, "linear_fc1"):
            _normed_inside(layer.pre_mlp_layernorm, layer.mlp.linear_fc1)
            layer.recompute_pre_mlp_layernorm = False
    with contextlib.ExitStack() as stack:
        functions: list[tuple[object, str, Callable[..., object], str]] = [
            (fused_bias_swiglu, "swiglu", halves, "y"),
            (fused_bias_swiglu, "weighted_swiglu", lambda y, weights: halves(y), "y weights"),
            (fused_bias_swiglu, "swiglu_back", lambda g, y: torch.empty_like(y), "g y"),
            (
                fused_bias_swiglu,
                "weighted_swiglu_back",
                lambda g, y, weights: (torch.empty_like(y), torch.empty_like(weights)),
                "g y weights",
            ),
            (
                SequentialMLP,
                "forward",
                _grouped(activation_recomputed, recipe, exact),
                "self permuted_local_hidden_states tokens_per_expert permuted_probs",
            ),
        ]
        for owner, name, new, parameters in functions:
            stack.enter_context(replaced(owner, name, new, parameters))
        for module, names in ENGINES.items():
            stack.enter_context(_with(import_module(module), names))
        stack.enter_context(_with(torch.nn.functional, {"scaled_dot_product_attention": _window}))
        yield


@contextlib.contextmanager
def _with(module: ModuleType, names: Mapping[str, object]) -> Iterator[None]:
    """The module with other things behind these names, some of which it has only where Transformer Engine is installed."""
    before = dict(vars(module))
    vars(module).update(names)
    try:
        yield
    finally:
        for name in names:
            if name in before:
                setattr(module, name, before[name])
            else:
                delattr(module, name)


def _configs(chunks: Sequence[Chunk]) -> Iterator[TransformerConfig]:
    """Every configuration that a module of the chunks reads: experts may have their own."""
    seen: set[int] = set()
    for chunk in chunks:
        for module in chunk.modules():
            config = getattr(module, "config", None)
            if isinstance(config, TransformerConfig) and id(config) not in seen:
                seen.add(id(config))
                yield config
