"""Qwen3, dense: RMS-normalised queries and keys, no biases."""

from __future__ import annotations

from megatron_rl.models.family import (
    ATTENTION,
    DENSE_MLP,
    NORMS,
    QK_NORMS,
    Family,
    ModelDescription,
    decoder_rules,
    describe_decoder,
    refuse_sliding_window,
)
from megatron_rl.models.hf_config import Fields, HFConfig


def _describe(config: HFConfig) -> ModelDescription:
    fields = Fields(config, "qwen3")
    description = describe_decoder(fields, head_dim=128, qk_norm=True)
    refuse_sliding_window(fields, description.dims["layers"])
    fields.finish()
    return description


QWEN3 = Family("qwen3", ("Qwen3ForCausalLM",), decoder_rules(NORMS, ATTENTION, QK_NORMS, DENSE_MLP), _describe)
