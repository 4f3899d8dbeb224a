"""The recipe's schema: the section `model`. See `schema`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from pydantic import Field

from megatron_rl.base.messages import errors_named
from megatron_rl.config.keys import Count, Pixels, Positive, Ranks, Section, Tokens, key
from megatron_rl.models.hf_config import JSON, HFConfig
from megatron_rl.models.rope import scaled


@dataclass
class CreateVisionConfig(Section):
    """A small vision tower: the model is then a Qwen2.5-VL, whose head_dim is hidden_size / heads, and prompts may have
    images."""

    layers: Annotated[int, Field(ge=1, le=1e4)] = key(
        2, "the last one attends over the whole image, those before it in windows"
    )
    hidden_size: Count = key(64)
    heads: Ranks = key(2, "attention heads")
    ffn_size: Annotated[int, Field(ge=1, le=1e7)] = key(128)
    patch: Annotated[int, Field(ge=1, le=1e3)] = key(
        4, "rows and columns of pixels of a patch; four patches are one token"
    )
    window: Annotated[int, Field(ge=1, le=1e5)] = key(16, "rows and columns of pixels of a window")


@dataclass
class CreateModelConfig(Section):
    """A small, randomly initialised Qwen3 model with a character tokenizer, made at start-up. For runs without
    downloads."""

    layers: Annotated[int, Field(ge=1, le=1e4)] = key(2)
    hidden_size: Count = key(128)
    heads: Ranks = key(4, "query heads")
    kv_heads: Ranks = key(2, "key/value heads")
    head_dim: Ranks = key(32)
    ffn_size: Annotated[int, Field(ge=1, le=1e7)] = key(256)
    vocab_size: Annotated[int, Field(ge=1, le=1e8)] = key(64, "rows of the embedding; the tokens are padded to it")
    characters: str = key("0123456789+-*/=#.,() ", "what the tokenizer knows")
    words: list[str] = key([], "strings that are one token each, e.g. `<think>`; the longest that fits counts")
    chat_template: str | None = key(
        None, "Jinja text, which the tokenizer gets as its chat template; null: it has none"
    )
    max_positions: Tokens = key(512, "longest sequence")
    tie_embeddings: bool = key(False, "output layer = embedding")
    init_std: Annotated[float, Field(gt=0, le=100)] = key(0.02, "standard deviation of the initial weights")
    vision: CreateVisionConfig | None = key(None, "the section below; null: the model reads text only")


@dataclass
class RopeScalingConfig(Section):
    """Longer sequences than config.json allows, by its own names and by YaRN: actor and engine get it, and the export has it
    in its config.json."""

    factor: Annotated[float, Field(gt=1, le=1e4)] = key(
        meaning="the longest sequence becomes so many times `original_max_position_embeddings`"
    )
    original_max_position_embeddings: Tokens = key(meaning="the longest sequence that the model was trained on")
    rope_type: Literal["yarn"] = key("yarn")
    attention_factor: Positive | None = key(
        None, "queries and keys are multiplied by it; null: by 0.1 ln(`factor`) + 1"
    )
    beta_fast: Positive | None = key(
        None, "dimensions with more turns within the original length are not scaled; null: 32"
    )
    beta_slow: Positive | None = key(None, "those with fewer are scaled by all of `factor`; null: 1")

    def fields(self) -> dict[str, JSON]:
        """The fields that are set, by config.json's names."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass
class ModelConfig(Section):
    path: str | None = key(
        None,
        "Hugging Face folder: `config.json`, `*.safetensors`, tokenizer; or a Megatron checkpoint that [`convert "
        "to-megatron`](conversion.md) made of one",
    )
    create: CreateModelConfig | None = key(None, "the section below")
    dtype: Literal["float32", "bfloat16"] = key(
        "bfloat16",
        "parameters and activations of actor and engine. The optimizer's master weights and the gradient sums are "
        "fp32 in either case",
    )
    min_pixels: Pixels | None = key(
        None,
        "models that read images: smaller ones are enlarged to so many pixels; null: as preprocessor_config.json says",
    )
    max_pixels: Pixels | None = key(
        None, "models that read images: larger ones are reduced to so many pixels; null: as there"
    )
    rope_scaling: RopeScalingConfig | None = key(None, "the section below; null: as config.json says")

    def completed(self, hf_config: HFConfig) -> HFConfig:
        """The model's config.json with what the recipe adds to it.

        Raises:
            ValueError: they contradict each other.
        """
        if self.rope_scaling is None:
            return hf_config
        with errors_named("`model.rope_scaling`"):
            return scaled(hf_config, self.rope_scaling.fields())
