"""Qwen2.5-VL: Qwen2's decoder with positions in three axes, behind a vision tower."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_rl.models import qwen3
from megatron_rl.models.attention import ATTENTION, QKV_BIAS
from megatron_rl.models.created import Sizes, TowerSizes
from megatron_rl.models.family import (
    DENSE_MLP,
    NORMS,
    Family,
    ModelDescription,
    Vision,
    decoder_rules,
    describe_decoder,
    refuse_sliding_window,
)
from megatron_rl.models.hf_config import JSON, Fields, HFConfig
from megatron_rl.models.rules import HFTensor, Place, Rule, Sharding

_TEXT, _VISION, _ROPE = "text_config", "vision_config", ("rope_scaling", "rope_parameters")
# Words that a tokenizer needs for images, by the field of config.json that has their id.
IMAGE_WORDS = {
    "<|vision_start|>": "vision_start_token_id",
    "<|image_pad|>": "image_token_id",
    "<|vision_end|>": "vision_end_token_id",
    "<|video_pad|>": "video_token_id",
}
_MODULE = "visual"
# By PIL: the other one needs torchvision.
_PROCESSOR = ("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil")
# What Qwen's chat template writes for an image; the processor repeats the middle one.
_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def _sections(config: HFConfig) -> tuple[HFConfig, tuple[int, ...]]:
    """The decoder's fields, wherever this version of config.json has them, and how many pairs of a head's dimensions turn by
    time, height and width."""
    nested = config.get(_TEXT)
    flat = {name: value for name, value in config.items() if name != _TEXT}
    text = {
        **flat,
        **(nested if isinstance(nested, dict) else {}),
        "tie_word_embeddings": config.get("tie_word_embeddings"),
    }
    sections: JSON = None
    for name in _ROPE:
        if isinstance(found := text.get(name), dict):
            rope = {key: "default" if value == "mrope" else value for key, value in found.items()}
            sections = rope.pop("mrope_section", sections)
            text[name] = rope
    if not (isinstance(sections, list) and len(sections) == 3 and all(isinstance(size, int) for size in sections)):
        raise ValueError(
            f"config.json: `mrope_section` of the rotary embedding is {sections!r}, expected three numbers"
        )
    return text, tuple(size for size in sections if isinstance(size, int))


def _describe(config: HFConfig) -> ModelDescription:
    text, sections = _sections(config)
    fields = Fields(text, "qwen2_5_vl")
    description = describe_decoder(fields, qkv_bias=True)
    refuse_sliding_window(fields, description.dims["layers"])
    image = fields.integer("image_token_id", 151655)
    for name in ("video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id"):
        fields.get(name)  # nothing computes with them
    tower = Fields(fields.section(_VISION), "qwen2_5_vl's vision tower")
    fields.finish()
    dims = dict(description.dims)
    if 2 * sum(sections) != description.attention.head_width:
        raise ValueError(
            f"config.json: `mrope_section` = {list(sections)} must add up to half of head_dim {dims['head_dim']}"
        )
    depth, merge = tower.integer("depth", 32), tower.integer("spatial_merge_size", 2)
    vision = Vision(image, _IMAGE, depth, merge, sections, {}, _MODULE, _PROCESSOR)
    for symbol, name, default in (
        ("v_hidden", "hidden_size", 3584),
        ("v_ffn", "intermediate_size", 3420),
        ("v_channels", "in_channels", 3),
        ("v_patch", "patch_size", 14),
        ("v_frames", "temporal_patch_size", 2),
    ):
        dims[symbol] = tower.integer(name, default)
    dims |= {"v_qkv": 3 * dims["v_hidden"], "v_merged": dims["v_hidden"] * vision.merge**2}
    heads, window = tower.integer("num_heads", 16), tower.integer("window_size", 112)
    if dims["v_hidden"] % (4 * heads):
        tower.refuse("num_heads", heads, f"heads must share hidden_size = {dims['v_hidden']} in multiples of 4")
    tower.only("hidden_act", "silu")
    tower.only("out_hidden_size", dims["hidden"])
    tower.only("in_chans", dims["v_channels"])
    tower.only("spatial_patch_size", dims["v_patch"])
    tower.only("rope_parameters", {"rope_theta": 10000.0, "rope_type": "axial"})
    tower.get("tokens_per_second")  # of videos
    full = tower.get("fullatt_block_indexes", [7, 15, 23, 31])
    tower.finish()
    settings = {
        "depth": vision.depth,
        "hidden_size": dims["v_hidden"],
        "intermediate_size": dims["v_ffn"],
        "in_channels": dims["v_channels"],
        "patch_size": dims["v_patch"],
        "temporal_patch_size": dims["v_frames"],
        "spatial_merge_size": vision.merge,
        "num_heads": heads,
        "window_size": window,
        "fullatt_block_indexes": full,
        "out_hidden_size": dims["hidden"],
    }
    model = {**description.model, "position_embedding_type": "mrope"}
    return replace(description, dims=dims, model=model, vision=replace(vision, tower=settings))


def created_config(create: Sizes, vision: TowerSizes) -> dict[str, JSON]:
    """config.json of the model that `model.create` makes with a vision tower; its tokenizer ends with `IMAGE_WORDS`."""
    first = 2 + len(create.characters) + len(create.words)
    tokens: dict[str, JSON] = {name: first + number for number, name in enumerate(IMAGE_WORDS.values())}
    text: dict[str, JSON] = {
        **qwen3.created_config(create),
        "architectures": None,
        "model_type": None,
        "head_dim": None,
    }
    half = create.head_dim // 2
    rope: dict[str, JSON] = {"rope_type": "default", "rope_theta": 10000.0}
    rope["mrope_section"] = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]
    text["rope_parameters"] = rope
    tower: dict[str, JSON] = {
        "depth": vision.layers,
        "hidden_size": vision.hidden_size,
        "intermediate_size": vision.ffn_size,
        "num_heads": vision.heads,
        "patch_size": vision.patch,
        "window_size": vision.window,
        "fullatt_block_indexes": [vision.layers - 1],
        "out_hidden_size": create.hidden_size,
    }
    return {
        "architectures": list(QWEN2_5_VL.architectures),
        "model_type": "qwen2_5_vl",
        _TEXT: {name: value for name, value in text.items() if value is not None},
        _VISION: tower,
        **tokens,
        "tie_word_embeddings": create.tie_embeddings,
        "dtype": "float32",
    }


def _linear(name: str, rows: str, columns: str, parts: tuple[str, ...] = ()) -> Iterator[Rule]:
    """Weight and bias of a layer of the tower, whole on every rank of actor and engine; `parts`: Hugging Face's, stacked."""
    prefix = name.rpartition(".")[0]
    sources = tuple(f"{prefix}.{part}" for part in parts) or (name,)
    yield _rule(f"{name}.weight", *(HFTensor(f"{source}.weight", (rows, columns)) for source in sources))
    yield _rule(f"{name}.bias", *(HFTensor(f"{source}.bias", (rows,)) for source in sources))


def _rule(name: str, *tensors: HFTensor) -> Rule:
    return Rule((name,), tensors, Sharding.REPLICATED, Place.EMBEDDING, engine=name, in_tower=True)


def _norm(name: str) -> Rule:
    return _rule(f"{name}.weight", HFTensor(f"{name}.weight", ("v_hidden",)))


def _rules(config: HFConfig) -> tuple[Rule, ...]:
    """The decoder's, and one per tensor of the tower, whose depth the config says."""
    depth = Fields(Fields(config, "qwen2_5_vl").section(_VISION), "qwen2_5_vl's vision tower").integer("depth", 32)
    patches = ("v_hidden", "v_channels", "v_frames", "v_patch", "v_patch")
    tower = [_rule(f"{_MODULE}.patch_embed.proj.weight", HFTensor(f"{_MODULE}.patch_embed.proj.weight", patches))]
    for number in range(depth):
        block = f"{_MODULE}.blocks.{number}"
        tower += [_norm(f"{block}.norm1"), _norm(f"{block}.norm2")]
        tower += _linear(f"{block}.attn.qkv", "v_qkv", "v_hidden")
        tower += _linear(f"{block}.attn.proj", "v_hidden", "v_hidden")
        tower += _linear(f"{block}.mlp.gate_up_proj", "v_ffn", "v_hidden", ("gate_proj", "up_proj"))
        tower += _linear(f"{block}.mlp.down_proj", "v_hidden", "v_ffn")
    tower.append(_norm(f"{_MODULE}.merger.ln_q"))
    tower += _linear(f"{_MODULE}.merger.mlp.0", "v_merged", "v_merged")
    tower += _linear(f"{_MODULE}.merger.mlp.2", "hidden", "v_merged")
    return (*_DECODER, *tower)


_DECODER = tuple(
    replace(rule, engine=f"language_model.{rule.engine}")
    for rule in decoder_rules(NORMS, ATTENTION, QKV_BIAS, DENSE_MLP)
)
QWEN2_5_VL = Family(
    "qwen2_5_vl",
    ("Qwen2_5_VLForConditionalGeneration",),
    _DECODER,
    _describe,
    module="vision",
    decoder="model.language_model.",
    rules_of=_rules,
)
