"""The known model families."""

from __future__ import annotations

from megatron_rl.models.classifier import classifier
from megatron_rl.models.family import Family, Model
from megatron_rl.models.hf_config import HFConfig
from megatron_rl.models.llama import LLAMA, MISTRAL
from megatron_rl.models.qwen2 import QWEN2
from megatron_rl.models.qwen3 import QWEN3
from megatron_rl.models.qwen3_moe import QWEN3_MOE

FAMILIES: tuple[Family, ...] = (QWEN2, QWEN3, QWEN3_MOE, LLAMA, MISTRAL)


def family_for(hf_config: HFConfig) -> Family:
    """The family that serves a config's architecture; of a classifier the family with a scalar head.

    Raises:
        ValueError: the architecture is missing or not known; the message lists the known ones.
    """
    architectures = hf_config.get("architectures") or []
    if not isinstance(architectures, list):
        architectures = [architectures]
    for family in (*FAMILIES, *map(classifier, FAMILIES)):
        if any(name in family.architectures for name in architectures):
            return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    found = ", ".join(map(repr, architectures)) or f"absent (model_type {hf_config.get('model_type')!r})"
    raise ValueError(f"config.json: `architectures` is {found}, which is not supported; supported: {known}")


def model_of(hf_config: HFConfig) -> Model:
    """The model that a config.json describes.

    Raises:
        ValueError: its architecture, or something in it that changes the forward pass, is not known.
    """
    family = family_for(hf_config)
    return Model(family, family.describe(hf_config))
