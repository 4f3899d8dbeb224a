"""The module of Llama-like decoders: Megatron-Core's `GPTModel`, of Transformer Engine's layers where it is installed."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor, nn

from megatron_rl.models.family import ModelDescription
from megatron_rl.modules.layers import PackedAttention, SequenceParallelRMSNorm
from megatron_rl.runtime import device
from megatron_rl.seams.megatron import Chunk, OutputLayer

ACTIVATIONS = {
    "silu": F.silu,
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
}  # by config.json's names


def build(
    description: ModelDescription,
    config: TransformerConfig,
    vocab_size: int,
    vp_stage: int | None,
    model: Callable[..., Chunk] = GPTModel,
) -> Chunk:
    """One chunk of this rank's model, see `registry.Build`; the pipeline stage is that of Megatron's groups.

    `model`: the class, or what takes its arguments.
    """
    ignore = vp_stage is None
    chunk = model(
        config=config,
        transformer_layer_spec=block_spec(config, vp_stage),
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=ignore, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=ignore, vp_stage=vp_stage),
        parallel_output=True,
        vp_stage=vp_stage,
        **(description.model | {"vocab_size": vocab_size}),
    )
    if "labels" in description.dims and chunk.post_process:  # a reward model
        chunk.output_layer = ScalarHead(config.hidden_size)
    return chunk


class ScalarHead(OutputLayer):
    """One output per token, in the output layer's place; whole on every tensor-parallel rank."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden_size))

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        return F.linear(input_, self.weight), None


def block_spec(config: TransformerConfig, vp_stage: int | None) -> ModuleSpec | TransformerBlockSubmodules:
    """The decoder block of one chunk: its layers, and the final norm."""
    experts, qk_norm = config.num_moe_experts, config.qk_layernorm
    if device.has_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts, moe_grouped_gemm=experts is not None and config.moe_grouped_gemm, qk_layernorm=qk_norm
        )
    spec = get_gpt_layer_local_spec(
        num_experts=experts, moe_grouped_gemm=False, qk_layernorm=qk_norm, normalization="RMSNorm"
    )
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = SequenceParallelRMSNorm
    attention.core_attention = PackedAttention
    if qk_norm:
        attention.q_layernorm = attention.k_layernorm = SequenceParallelRMSNorm
    layers = [spec] * get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=SequenceParallelRMSNorm)
