"""Conversion between Hugging Face folders and Megatron-Core distributed checkpoints (docs/conversion.md)."""

from megatron_rl.checkpoint.convert.source import open_weights
