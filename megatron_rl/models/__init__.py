"""Model families: one declaration each, used by everyone who plans, checks, reads, writes or moves weights.

What is imported here needs no torch; what moves tensors is in `load`, `gather`, `export` and `create`.
"""

from megatron_rl.models.family import Family, Model, ModelDescription
from megatron_rl.models.hf_config import HFConfig
from megatron_rl.models.registry import family_for, model_of
from megatron_rl.models.rules import padded_vocab_size
from megatron_rl.models.text_only import read_hf_config
