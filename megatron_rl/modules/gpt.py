"""The module of Llama-like decoders: Megatron-Core's `GPTModel`, of Transformer Engine's layers where it is installed."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn

from megatron_rl.models.family import ModelDescription
from megatron_rl.modules import gated_delta_layers
from megatron_rl.modules.latent import LatentAttention
from megatron_rl.modules.layers import PackedAttention, SequenceParallelRMSNorm
from megatron_rl.modules.rotary import set_frequencies
from megatron_rl.runtime import device
from megatron_rl.seams.megatron import Chunk, OutputLayer


def quick_gelu(x: Tensor) -> Tensor:
    """Megatron-Core's own is compiled when it is first used."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS = {
    "silu": F.silu,
    "quick_gelu": quick_gelu,
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
    if not config.multi_latent_attention:  # which has its own rotary embedding, with YaRN
        set_frequencies(chunk.get_submodule("rotary_pos_emb"), description.rope, config.kv_channels)
    for module in chunk.modules():
        # Megatron-Core does not mark sinks as cut over tensor-parallel ranks: the gradient's norm would leave some out.
        if isinstance(sinks := getattr(module, "softmax_offset", None), nn.Parameter):
            set_tensor_model_parallel_attributes(sinks, is_parallel=True, dim=0, stride=1)
        if isinstance(module, SequentialMLP) and config.add_bias_linear:
            for expert in module.local_experts:
                expert.linear_fc2.register_forward_hook(_copied)
    for name, parameter in chunk.named_parameters():
        # Megatron-Core would sum experts' biases over tensor-parallel ranks, which have other experts, or whose gradients are
        # summed as those of copies already: docs/upstream.md.
        if ".mlp.experts." in name and hasattr(parameter, "sequence_parallel"):
            parameter.sequence_parallel = False
    if "labels" in description.dims and chunk.post_process:  # a reward model
        chunk.output_layer = ScalarHead(config.hidden_size)
    return chunk


def _copied(linear: nn.Module, inputs: object, output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """A hook: Megatron-Core adds an expert's bias in place, to what autograd takes for a view of another layer's tensor."""
    return output[0].clone(), output[1]


class ScalarHead(OutputLayer):
    """One output per token, in the output layer's place; whole on every tensor-parallel rank."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden_size))

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        return F.linear(input_, self.weight), None


def block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The decoder block of one chunk: its layers, by `moe_layer_freq` dense or with experts, and the final norm."""
    transformer_engine = device.has_transformer_engine()
    plain = gated_delta_layers.without(config)
    block = get_gpt_decoder_block_spec(plain, transformer_engine, normalization="RMSNorm", vp_stage=vp_stage)
    if transformer_engine:
        return gated_delta_layers.put_in(block, config, vp_stage)
    for spec in block.layer_specs:
        layer, attention = spec.submodules, spec.submodules.self_attention.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = SequenceParallelRMSNorm
        attention.core_attention = PackedAttention
        if config.multi_latent_attention:
            layer.self_attention.module = LatentAttention
            attention.q_layernorm = attention.kv_layernorm = SequenceParallelRMSNorm
        elif config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = SequenceParallelRMSNorm
    block.layer_norm = SequenceParallelRMSNorm
    return gated_delta_layers.put_in(block, config, vp_stage)
