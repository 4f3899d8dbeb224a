"""Qwen's families with a vision tower share words for images, the decoder's part of config.json, rules of a tower."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_rl.models.hf_config import JSON, Fields, HFConfig
from megatron_rl.models.rules import HFTensor, Place, Rule, Sharding

TEXT, VISION, _ROPE = "text_config", "vision_config", ("rope_scaling", "rope_parameters")
# Words that a tokenizer needs for images, by the field of config.json that has their id.
IMAGE_WORDS = {
    "<|vision_start|>": "vision_start_token_id",
    "<|image_pad|>": "image_token_id",
    "<|vision_end|>": "vision_end_token_id",
    "<|video_pad|>": "video_token_id",
}
MODULE = "visual"
# By PIL: the other one needs torchvision.
PROCESSOR = ("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil")
# What Qwen's chat template writes for an image; the processor repeats the middle one.
IMAGE_TEXT = "<|vision_start|><|image_pad|><|vision_end|>"


@dataclass(frozen=True)
class DecoderConfig:
    """The decoder's part of a config.json.

    Attributes:
        fields: as a model without a tower has them.
        sections: pairs of a head's dimensions that turn by time, height and width.
        interleaved: whether these take turns (`mrope_interleaved`), or follow one another.
    """

    fields: HFConfig
    sections: tuple[int, ...]
    interleaved: bool

    @classmethod
    def read(cls, config: HFConfig) -> DecoderConfig:
        """Wherever this version of config.json has them. ValueError: the rotary embedding has no three sections, or scales
        positions."""
        nested = config.get(TEXT)
        flat = {name: value for name, value in config.items() if name != TEXT}
        text = {
            **flat,
            **(nested if isinstance(nested, dict) else {}),
            "tie_word_embeddings": config.get("tie_word_embeddings"),
        }
        sections: JSON = None
        interleaved: JSON = False
        for name in _ROPE:
            if isinstance(found := text.get(name), dict):
                rope = {key: "default" if value == "mrope" else value for key, value in found.items()}
                sections = rope.pop("mrope_section", sections)
                interleaved = rope.pop("mrope_interleaved", interleaved)
                if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
                    raise ValueError(
                        f"config.json: `{name}.rope_type` = {kind!r}: positions in three axes are supported as they are, "
                        "not scaled"
                    )
                text[name] = rope
        if not (isinstance(sections, list) and len(sections) == 3 and all(isinstance(size, int) for size in sections)):
            raise ValueError(
                f"config.json: `mrope_section` of the rotary embedding is {sections!r}, expected three numbers"
            )
        return cls(text, tuple(size for size in sections if isinstance(size, int)), interleaved is True)

    def check_sections(self, head_dim: int) -> None:
        """ValueError: they are not all pairs of a head."""
        if 2 * sum(self.sections) != head_dim:
            raise ValueError(
                f"config.json: `mrope_section` = {list(self.sections)} must add up to half of head_dim {head_dim}"
            )


def image_token(fields: Fields) -> int:
    """The id of the word that an image's tokens have; reads those of the other words, with which nothing computes."""
    for name in ("video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id"):
        fields.get(name)
    return fields.integer("image_token_id", 151655)


def tower_rule(name: str, *tensors: HFTensor) -> Rule:
    """A parameter of the tower, whole on every rank of actor and engine, under one name in both."""
    return Rule((name,), tensors, Sharding.REPLICATED, Place.EMBEDDING, engine=(name,) * len(tensors), in_tower=True)


def tower_linear(name: str, rows: str, columns: str, parts: tuple[str, ...] = (), files: str = "") -> Iterator[Rule]:
    """Weight and bias of a layer. `parts`: Hugging Face's, stacked; `files`: what stands before names in files."""
    prefix = files + name.rpartition(".")[0]
    sources = tuple(f"{prefix}.{part}" for part in parts) or (files + name,)
    yield tower_rule(f"{name}.weight", *(HFTensor(f"{source}.weight", (rows, columns)) for source in sources))
    yield tower_rule(f"{name}.bias", *(HFTensor(f"{source}.bias", (rows,)) for source in sources))
