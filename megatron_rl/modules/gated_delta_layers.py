"""Gated-delta layers in a decoder of Megatron-Core's: its module, with `fla`'s kernels or with the plain ones here."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch
import torch.nn.functional as F
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules, torch_chunk_gated_delta_rule
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from megatron_rl.modules.layers import Padding, SequenceParallelRMSNorm
from megatron_rl.runtime import device
from megatron_rl.seams.megatron_gated_delta import GatedDeltaLayer, use_without_fla

_CHUNK = 16  # tokens; what a chunk takes grows with the square, and most sequences on a CPU are short


def without(config: TransformerConfig) -> TransformerConfig:
    """The configuration as Megatron-Core's decoder specs take it, which know of no gated-delta layers."""
    plain = copy(config)
    plain.experimental_attention_variant = None
    return plain


def put_in(
    block: TransformerBlockSubmodules, config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The decoder block of a chunk with gated-delta layers where `linear_attention_freq`, a list, has them."""
    if config.experimental_attention_variant != "gated_delta_net":
        return block
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    pattern = config.linear_attention_freq[first : first + get_num_layers_to_build(config, vp_stage=vp_stage)]
    attention, fused = _layer()
    for number, (spec, is_linear) in enumerate(zip(block.layer_specs, pattern, strict=True)):
        if is_linear:
            names = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}  # in checkpoints, as the fused module's
            changes = {"self_attention": attention, **({"input_layernorm": IdentityOp} if fused else {})}
            if not fused:
                changes["sharded_state_dict_keys_map"] = {**spec.submodules.sharded_state_dict_keys_map, **names}
            block.layer_specs[number] = replace(spec, submodules=replace(spec.submodules, **changes))
    return block


def _layer() -> tuple[ModuleSpec, bool]:
    """The layer's spec, and whether the norm before it is fused into it."""
    use_without_fla(convolution, gated_delta_rule, l2_norm)
    if not device.has_transformer_engine():
        backend = LocalSpecProvider()
        inside = GatedDeltaNetSubmodules(backend.column_parallel_linear(), PlainNorm, backend.row_parallel_linear())
        return ModuleSpec(module=GatedDeltaLayer, submodules=inside), False
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    engine = TESpecProvider()
    inside = GatedDeltaNetSubmodules(
        engine.column_parallel_layer_norm_linear(), PlainNorm, engine.row_parallel_linear()
    )
    return ModuleSpec(module=GatedDeltaLayer, submodules=inside), True


class PlainNorm:
    """The norm of a layer's output, which multiplies by its weight also where all others multiply by 1 + weight."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float) -> nn.Module:  # type: ignore[misc]
        config = copy(config)
        config.layernorm_zero_centered_gamma = False
        if not device.has_transformer_engine():
            return SequenceParallelRMSNorm(config, hidden_size, eps)
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm(config, hidden_size, eps)


# ------------------------------------------------------------- in the places of fla's kernels, with the arguments in use
def l2_norm(x: Tensor) -> Tensor:
    """Vectors divided by their length, along the last dimension; computed in fp32."""
    whole = x.float()
    return (whole * torch.rsqrt(whole.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    initial_state: None,
    output_final_state: bool,
    cu_seqlens: Tensor,
) -> tuple[Tensor, None]:
    """SiLU of the causal convolution of every channel: x [1, t, channels] packed, weight [channels, tokens]."""
    padding = Padding(cu_seqlens.long(), int(cu_seqlens.diff().max()))
    before = weight.shape[1] - 1
    out = [
        F.silu(F.conv1d(F.pad(batch.transpose(1, 2), (before, 0)), weight[:, None], bias, groups=len(weight)))
        for batch in padding.pad(x[0])
    ]
    return padding.unpad([batch.transpose(1, 2) for batch in out])[None], None


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor,
) -> tuple[Tensor, None]:
    """Yang et al. 2024, by Megatron-Core's plain rule: query, key [1, t, heads, key dim], value [1, t, heads, value dim], `g`
    (logarithms of the decay) and `beta` [1, t, heads], packed. Zeros after a sequence's end change none of its outputs."""
    padding = Padding(cu_seqlens.long(), int(cu_seqlens.diff().max()))
    batches = zip(*(padding.pad(x[0]) for x in (query, key, value, g, beta)), strict=True)
    out = [torch_chunk_gated_delta_rule(*batch, chunk_size=_CHUNK)[0] for batch in batches]
    return padding.unpad(out)[None], None
