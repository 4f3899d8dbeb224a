"""The known model families."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.models import qwen2_5_vl, qwen3, qwen3_moe
from megatron_rl.models.classifier import classifier
from megatron_rl.models.created import Sizes
from megatron_rl.models.deepseek_v3 import DEEPSEEK_V3
from megatron_rl.models.family import Family, Model
from megatron_rl.models.glm4_moe import GLM4_MOE
from megatron_rl.models.gpt_oss import GPT_OSS
from megatron_rl.models.hf_config import JSON, HFConfig
from megatron_rl.models.llama import LLAMA, MISTRAL
from megatron_rl.models.qwen2 import QWEN2
from megatron_rl.models.qwen2_5_vl import QWEN2_5_VL
from megatron_rl.models.qwen3 import QWEN3
from megatron_rl.models.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from megatron_rl.models.qwen3_moe import QWEN3_MOE
from megatron_rl.models.qwen3_vl import QWEN3_VL, QWEN3_VL_MOE
from megatron_rl.models.tower import IMAGE_WORDS

FAMILIES: tuple[Family, ...] = (
    QWEN2,
    QWEN2_5_VL,
    QWEN3,
    QWEN3_MOE,
    QWEN3_VL,
    QWEN3_VL_MOE,
    QWEN3_5,
    QWEN3_5_MOE,
    LLAMA,
    MISTRAL,
    DEEPSEEK_V3,
    GLM4_MOE,
    GPT_OSS,
)


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
            return family if family.rules_of is None else replace(family, rules=family.rules_of(hf_config))
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    found = ", ".join(map(repr, architectures)) or f"absent (model_type {hf_config.get('model_type')!r})"
    raise ValueError(f"config.json: `architectures` is {found}, which is not supported; supported: {known}")


def created_config(create: Sizes, experts: int = 0) -> dict[str, JSON]:
    """config.json of the model that `model.create` makes, as far as it differs from transformers' defaults: Qwen3's, with
    `experts` its mixture, with a vision tower Qwen2.5-VL's."""
    if create.vision is not None:
        return qwen2_5_vl.created_config(create, create.vision)
    return qwen3_moe.created_config(create, experts) if experts else qwen3.created_config(create)


def created_words(create: Sizes) -> tuple[str, ...]:
    """Words that the tokenizer of such a model needs beside those of the recipe."""
    return () if create.vision is None else tuple(IMAGE_WORDS)


def model_of(hf_config: HFConfig) -> Model:
    """The model that a config.json describes.

    Raises:
        ValueError: its architecture, or something in it that changes the forward pass, is not known.
    """
    family = family_for(hf_config)
    description = family.describe(hf_config)
    if description.attention.head_width % 2:
        raise ValueError(
            f"config.json: heads of {description.attention.head_width} numbers: rotary embeddings turn pairs of them"
        )
    router = description.transformer
    chosen, scores = router.get("moe_router_topk"), router.get("moe_router_score_function")
    if chosen == 1 and scores == "softmax" and not router.get("moe_router_pre_softmax"):
        raise ValueError(
            "config.json: num_experts_per_tok = 1 with normalised weights: a lone expert's is 1 whatever the router says, "
            "which would learn nothing; Megatron-Core refuses it"
        )
    return Model(family, description)
