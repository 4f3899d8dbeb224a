"""Reward models: every family's decoder with one output per token in place of the output layer.

On disk it is Hugging Face's `…ForSequenceClassification` with one label. No torch, as in `family`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from megatron_rl.models.family import Family, ModelDescription
from megatron_rl.models.hf_config import JSON, Fields, HFConfig
from megatron_rl.models.rules import HFTensor, Place, Rule, Sharding

_POLICY, _CLASSIFIER = "ForCausalLM", "ForSequenceClassification"
# Under the output layer's name, which Megatron-Core's checkpoints look for on the last stage.
SCORE = Rule(
    ("output_layer.weight",), (HFTensor("score.weight", ("labels", "hidden")),), Sharding.REPLICATED, Place.HEAD
)


@cache
def classifier(family: Family) -> Family:
    """The family's reward models."""

    def describe(hf_config: HFConfig) -> ModelDescription:
        labels = num_labels(hf_config)
        if labels != 1:
            raise ValueError(f"config.json: the classifier has {labels} labels (`id2label`); a reward model has one")
        found = family.describe({name: value for name, value in hf_config.items() if name != "num_labels"})
        untied = {**found.model, "share_embeddings_and_output_weights": False}
        return replace(found, dims={**found.dims, "labels": 1}, model=untied)

    return replace(
        family,
        architectures=tuple(name.replace(_POLICY, _CLASSIFIER) for name in family.architectures),
        rules=(*(rule for rule in family.rules if not rule.is_output), SCORE),
        describe=describe,
    )


def num_labels(hf_config: HFConfig) -> int:
    """Outputs of the classifier that a config.json describes; transformers' default is 2."""
    names = hf_config.get("id2label")
    return Fields(hf_config, "reward model").integer("num_labels", len(names) if isinstance(names, dict) else 2)


def is_classifier(family: Family) -> bool:
    return SCORE in family.rules


def classifier_config(family: Family, hf_config: HFConfig) -> dict[str, JSON]:
    """config.json of the reward model that is made of a policy of this family."""
    return {
        **hf_config,
        "architectures": list(classifier(family).architectures[:1]),
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
