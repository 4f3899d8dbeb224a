"""Model families: one declarative weight map each, used by everyone who reads, writes or moves weights."""

from megatron_rl.models.create import create_model
from megatron_rl.models.export import export_hf
from megatron_rl.models.family import Family, ModelDescription
from megatron_rl.models.gather import iter_hf_weights
from megatron_rl.models.hf_config import HFConfig, read_hf_config
from megatron_rl.models.load import load_hf_weights
from megatron_rl.models.parallel import Axis, ParallelGroups
from megatron_rl.models.registry import family_for
from megatron_rl.models.rules import merge_shards, padded_vocab_size, shard_tensor

__all__ = [
    "Axis",
    "Family",
    "HFConfig",
    "ModelDescription",
    "ParallelGroups",
    "create_model",
    "export_hf",
    "family_for",
    "iter_hf_weights",
    "load_hf_weights",
    "merge_shards",
    "padded_vocab_size",
    "read_hf_config",
    "shard_tensor",
]
