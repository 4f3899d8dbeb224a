"""Qwen2.5-VL: Qwen2's decoder with positions in three axes, behind a vision tower."""

from __future__ import annotations

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
from megatron_rl.models.rules import HFTensor, Rule
from megatron_rl.models.tower import (
    IMAGE_TEXT,
    IMAGE_WORDS,
    MODULE,
    PROCESSOR,
    TEXT,
    VISION,
    DecoderConfig,
    image_token,
    tower_linear,
    tower_rule,
)


def _describe(config: HFConfig) -> ModelDescription:
    decoder = DecoderConfig.read(config)
    fields = Fields(decoder.fields, "qwen2_5_vl")
    description = describe_decoder(fields, qkv_bias=True)
    refuse_sliding_window(fields, description.dims["layers"])
    if decoder.interleaved:
        fields.refuse("mrope_interleaved", True, "its axes follow one another")
    image = image_token(fields)
    tower = Fields(fields.section(VISION), "qwen2_5_vl's vision tower")
    fields.finish()
    dims = dict(description.dims)
    decoder.check_sections(description.attention.head_width)
    depth, merge = tower.integer("depth", 32), tower.integer("spatial_merge_size", 2)
    vision = Vision(image, IMAGE_TEXT, depth, merge, decoder.sections, {}, MODULE, PROCESSOR)
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
        TEXT: {name: value for name, value in text.items() if value is not None},
        VISION: tower,
        **tokens,
        "tie_word_embeddings": create.tie_embeddings,
        "dtype": "float32",
    }


def _norm(name: str) -> Rule:
    return tower_rule(f"{name}.weight", HFTensor(f"{name}.weight", ("v_hidden",)))


def _rules(config: HFConfig) -> tuple[Rule, ...]:
    """The decoder's, and one per tensor of the tower, whose depth the config says."""
    depth = Fields(Fields(config, "qwen2_5_vl").section(VISION), "qwen2_5_vl's vision tower").integer("depth", 32)
    patches = ("v_hidden", "v_channels", "v_frames", "v_patch", "v_patch")
    tower = [tower_rule(f"{MODULE}.patch_embed.proj.weight", HFTensor(f"{MODULE}.patch_embed.proj.weight", patches))]
    for number in range(depth):
        block = f"{MODULE}.blocks.{number}"
        tower += [_norm(f"{block}.norm1"), _norm(f"{block}.norm2")]
        tower += tower_linear(f"{block}.attn.qkv", "v_qkv", "v_hidden")
        tower += tower_linear(f"{block}.attn.proj", "v_hidden", "v_hidden")
        tower += tower_linear(f"{block}.mlp.gate_up_proj", "v_ffn", "v_hidden", ("gate_proj", "up_proj"))
        tower += tower_linear(f"{block}.mlp.down_proj", "v_hidden", "v_ffn")
    tower.append(_norm(f"{MODULE}.merger.ln_q"))
    tower += tower_linear(f"{MODULE}.merger.mlp.0", "v_merged", "v_merged")
    tower += tower_linear(f"{MODULE}.merger.mlp.2", "hidden", "v_merged")
    return (*_DECODER, *tower)


_DECODER = tuple(
    rule.renamed_in_engine("language_model.{}".format) for rule in decoder_rules(NORMS, ATTENTION, QKV_BIAS, DENSE_MLP)
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
