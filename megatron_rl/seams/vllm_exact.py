"""vLLM's modules, exact: they compute with `base.exact_rows`, as the actor's then do. Written for 0.32.

On a CPU its linear layers take whatever `dispatch_cpu_unquantized_gemm` gives them after their weights were loaded, and the
pages of its cache are written and read here, so that their layout is ours. On a GPU both are vLLM's own
(`seams.vllm_invariant`). The others are found in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p, random_sample

from megatron_rl.base import exact_rows as exact
from megatron_rl.seams import check_parameters
from megatron_rl.seams.vllm_decoding import draw_ahead

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker

DISPATCH = "layer remove_weight"
IMPL = "self layer query key value kv_cache attn_metadata output output_scale output_block_scale"
UPDATE = "self layer key value kv_cache slot_mapping"
SAMPLE = "self logits generators k p"
EXACT = "_exact"  # attribute of a layer


def make_exact(worker: Worker, turns: Tensor, shards: Sequence[int], over_all: bool) -> None:
    """From here on this rank's part of an engine computes with `base.exact_rows`; before it has got its weights.

    Args:
        turns: see `exact.rotary_table`.
        shards: rows of the output layer of each of the actor's tensor-parallel ranks.
        over_all: see `exact.route`.
    """
    runner, on_cpu, turns = worker.model_runner, current_platform.is_cpu(), turns.to(worker.device)

    def of_logits(logits: Tensor) -> Tensor:
        return exact.log_softmax(logits, shards)

    runner.sampler.compute_logprobs = of_logits
    if on_cpu:
        check_parameters(CPUAttentionBackendImpl.forward, IMPL)
        check_parameters(CPUAttentionBackendImpl.do_kv_cache_update, UPDATE)
        _dispatch_exact()
        draw_ahead(runner.sampler.topk_topp_sampler, of_logits)
    else:
        check_parameters(TopKTopPSampler.forward_native, SAMPLE)
        runner.sampler.topk_topp_sampler.forward = partial(_sample, of_logits)
    for layer in runner.get_model().modules():
        if isinstance(layer, RMSNorm):
            layer._forward_method = partial(_norm, layer)
        elif isinstance(layer, SiluAndMul):
            layer._forward_method = _swiglu
        elif isinstance(layer, RotaryEmbedding):
            layer._forward_method = partial(_rotate, layer.head_size, turns)
        elif isinstance(layer, MoERunner):
            if on_cpu:
                method = layer.routed_experts.quant_method
                method.process_weights_after_loading = partial(_keep_experts, method.process_weights_after_loading)
            layer.forward = partial(_mix, layer, over_all)
        elif isinstance(layer, Attention) and on_cpu:
            layer.impl.forward = partial(_attend, layer.impl)
            layer.impl.do_kv_cache_update = _keep
        elif hasattr(layer, "cpu_linear"):
            setattr(layer, EXACT, True)
            if layer.weight.numel():  # of no packed copy: where its kernels lack the dtype
                layer.quant_method.process_weights_after_loading(layer)


def _sample(
    log_softmax: Callable[[Tensor], Tensor],
    logits: Tensor,
    generators: dict[int, torch.Generator],
    k: Tensor | None,
    p: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Draws as vLLM does on a GPU (`forward_native`), and returns these log-probs."""
    logits = apply_top_k_top_p(logits, k, p)
    return random_sample(logits.softmax(dim=-1, dtype=torch.float32), generators), log_softmax(logits)


def _dispatch_exact() -> None:
    original = utils.dispatch_cpu_unquantized_gemm
    if original.__name__ == "dispatch":
        return
    check_parameters(original, DISPATCH)

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if not getattr(layer, EXACT, False) or layer.weight.is_meta:
            original(layer, remove_weight)
            return
        weight = layer.weight.detach().float().clone()
        layer.cpu_linear = lambda x, _, bias: exact.linear(x, weight, bias)
        if remove_weight:
            layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)

    utils.dispatch_cpu_unquantized_gemm = dispatch


def _norm(layer: RMSNorm, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    if residual is None:
        return exact.rms_norm(x, layer.weight.data, layer.variance_epsilon)
    residual = residual + x
    return exact.rms_norm(residual, layer.weight.data, layer.variance_epsilon), residual


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return exact.silu(gate) * up


def _rotate(width: int, turns: Tensor, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    by_token = turns[positions]
    query, key = (exact.rotate(x.view(len(x), -1, width), by_token).view(x.shape) for x in (query, key))
    return query, key


def _sides(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """[pages, kv heads, tokens, d] of keys, and of values."""
    pages, heads, tokens, _ = kv_cache.shape
    return kv_cache.view(pages, heads, 2 * tokens, -1).split(tokens, dim=2)


def _keep(layer: object, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    slots = slot_mapping.long()
    for side, new in zip(_sides(kv_cache), (key, value), strict=True):
        side[slots // side.shape[2], :, slots % side.shape[2]] = new[: len(slots)]


def _attend(
    impl: CPUAttentionBackendImpl,
    layer: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    attn_metadata: CPUAttentionMetadata | None,
    output: Tensor,
    output_scale: Tensor | None = None,
    output_block_scale: Tensor | None = None,
) -> Tensor:
    if attn_metadata is None:  # while vLLM measures itself
        return output
    items: exact.Items | None = getattr(attn_metadata, EXACT, None)
    if items is None:  # the first layer's are all layers'
        queries = attn_metadata.query_start_loc.long().diff()
        size = exact.queries_of_item(impl.num_heads, impl.num_kv_heads)
        items = exact.Items.of(queries, attn_metadata.seq_lens[: len(queries)].long(), size)
        setattr(attn_metadata, EXACT, items)
    tokens = attn_metadata.num_actual_tokens
    keys, values = _sides(kv_cache)
    out = exact.attention(query[:tokens], keys, values, attn_metadata.block_table.long(), items, impl.scale)
    output[:tokens] = out
    return output


def _keep_experts(process: Callable[[RoutedExperts], None], layer: RoutedExperts) -> None:
    """Keeps the weights as they came; what vLLM's kernels pack of them is not used."""
    setattr(layer, EXACT, (layer.w13_weight.detach().float().clone(), layer.w2_weight.detach().float().clone()))
    process(layer)


def _mix(layer: MoERunner, over_all: bool, hidden_states: Tensor, router_logits: Tensor, **_: object) -> Tensor:
    """Whole experts, this rank's; the outputs of a token's experts are added in order once they are on every rank."""
    config, x, gate, experts = layer.moe_config, hidden_states.float(), layer.gate, layer.routed_experts
    logits = gate.cpu_linear(x, gate.weight, None) if x.is_cpu else exact.linear(x, gate.weight.float())
    weights, chosen = exact.route(logits, config.experts_per_token, over_all)
    outputs = hidden_states.new_zeros(*chosen.shape, hidden_states.shape[1])
    held = experts.expert_map_manager.get_local_expert_ids()
    kept = getattr(experts, EXACT, (experts.w13_weight, experts.w2_weight))
    for number, gate_up, down in zip(held, *kept, strict=True):
        rows, places = (chosen == number).nonzero(as_tuple=True)
        if len(rows):
            inner = _swiglu(exact.linear(hidden_states[rows], gate_up))
            inner = (inner * weights[rows, places, None]).to(inner.dtype)
            outputs[rows, places] = exact.linear(inner, down)
    if config.moe_parallel_config.ep_size > 1:
        outputs = tensor_model_parallel_all_reduce(outputs)
    out = torch.zeros_like(hidden_states)
    everyone = torch.arange(len(out))
    for of_experts in outputs.unbind(1):
        out = exact.add_expert(out, everyone, of_experts)
    return out
