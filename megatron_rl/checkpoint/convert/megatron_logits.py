"""Logits of a checkpoint by Megatron-Core, in this process alone."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_rl.actor.build import build_model
from megatron_rl.checkpoint.convert.merged import stored_model
from megatron_rl.checkpoint.convert.source import SourceModel
from megatron_rl.config.actor import ActorConfig
from megatron_rl.runtime import device
from megatron_rl.weights.load_hf import load_hf_weights
from megatron_rl.weights.parallel import ParallelGroups


def megatron_logits(folder: Path, config: Path, tokens: Tensor, master: bool = False) -> Tensor:
    """Logits [length, padded vocabulary] of tokens [1, length]; makes a process group of its own."""
    model = SourceModel.read(config)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with device.megatron(), torch.no_grad():
        parallel_state.initialize_model_parallel()
        chunks = build_model(model, ActorConfig(), torch.float32)
        source = stored_model(folder, model, any_padding=True, master=master)
        load_hf_weights(chunks, model.family, model.hf_config, source, ParallelGroups.from_megatron())
        length = tokens.shape[1]
        offsets = torch.tensor([0, length], dtype=torch.int32)
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=length, max_seqlen_kv=length
        )
        positions = torch.arange(length)[None]
        logits = chunks[0](tokens, positions, attention_mask=None, packed_seq_params=packed)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return logits[0]
