"""Qwen3-VL: Qwen3's decoder with positions in three interleaved axes, behind a vision tower that feeds its first layers too
(Bai et al. 2025; DeepStack, Meng et al. 2024, arXiv:2406.04334)."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.models.attention import ATTENTION, QK_NORMS
from megatron_rl.models.expert_stacks import Stacking
from megatron_rl.models.experts import MOE, MOE_NORMS
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
from megatron_rl.models.qwen3_moe import with_experts
from megatron_rl.models.rules import HFTensor, Rule
from megatron_rl.models.tower import (
    IMAGE_TEXT,
    MODULE,
    PROCESSOR,
    VISION,
    DecoderConfig,
    image_token,
    tower_linear,
    tower_rule,
)

_NAME, _TOWER = "qwen3_vl", "qwen3_vl's vision tower"
_FILES = "model."  # before the tower's names in files
_DECODER = "model.language_model."  # before the decoder's
_THETA = 500000.0  # where config.json does not say


def interleaved(sections: tuple[int, ...]) -> tuple[int, ...]:
    """Runs of pairs by time, height, width, time, and so on, in which these three take turns for as long as height and width
    have pairs; the rest are of time (transformers' and vLLM's interleaved M-RoPE)."""
    pairs, runs = sum(sections), list[int]()
    for pair in range(pairs):
        axis = pair % 3 if pair < 3 * sections[pair % 3] else 0
        if axis == 0 and len(runs) % 3 == 1:
            runs[-1] += 1
            continue
        runs += [0] * ((axis - len(runs)) % 3)
        runs.append(1)
    return (*runs, *[0] * (-len(runs) % 3))


def _decoder(config: HFConfig) -> tuple[DecoderConfig, Fields]:
    decoder = DecoderConfig.read(config)
    fields = Fields({"rope_theta": _THETA, **decoder.fields}, _NAME)
    if not decoder.interleaved:
        fields.refuse("mrope_interleaved", False, "transformers interleaves the axes, vLLM would not; set it to true")
    return decoder, fields


def _describe(config: HFConfig) -> ModelDescription:
    decoder, fields = _decoder(config)
    description = describe_decoder(fields, head_dim=128, qk_norm=True)
    refuse_sliding_window(fields, description.dims["layers"])
    return _with_tower(description, decoder, fields)


def _describe_mixture(config: HFConfig) -> ModelDescription:
    decoder, fields = _decoder(config)
    description = with_experts(describe_decoder(fields, qk_norm=True), fields, normalised=True)
    fields.only("norm_topk_prob", True)  # what transformers computes, whatever it says
    return _with_tower(description, decoder, fields)


def _with_tower(description: ModelDescription, decoder: DecoderConfig, fields: Fields) -> ModelDescription:
    image = image_token(fields)
    tower = Fields(fields.section(VISION), _TOWER)
    fields.finish()
    decoder.check_sections(description.attention.head_width)
    depth, merge = tower.integer("depth", 27), tower.integer("spatial_merge_size", 2)
    dims = dict(description.dims)
    for symbol, name, default in (
        ("v_hidden", "hidden_size", 1152),
        ("v_ffn", "intermediate_size", 4304),
        ("v_channels", "in_channels", 3),
        ("v_patch", "patch_size", 16),
        ("v_frames", "temporal_patch_size", 2),
        ("v_positions", "num_position_embeddings", 2304),
    ):
        dims[symbol] = tower.integer(name, default)
    dims |= {"v_qkv": 3 * dims["v_hidden"], "v_merged": dims["v_hidden"] * merge**2}
    heads = tower.integer("num_heads", 16)
    if dims["v_hidden"] % (4 * heads):
        tower.refuse("num_heads", heads, f"heads must share hidden_size = {dims['v_hidden']} in multiples of 4")
    tower.only("hidden_act", "gelu_pytorch_tanh")
    tower.only("out_hidden_size", dims["hidden"])
    tower.only("rope_parameters", {"rope_theta": 10000.0, "rope_type": "axial"})
    deep = _deepstack(tower, depth, dims["layers"])
    tower.finish()
    settings: dict[str, JSON] = {
        "depth": depth,
        "hidden_size": dims["v_hidden"],
        "intermediate_size": dims["v_ffn"],
        "in_channels": dims["v_channels"],
        "patch_size": dims["v_patch"],
        "temporal_patch_size": dims["v_frames"],
        "spatial_merge_size": merge,
        "num_heads": heads,
        "num_position_embeddings": dims["v_positions"],
        "out_hidden_size": dims["hidden"],
        "deepstack_visual_indexes": list(deep),
    }
    model = {**description.model, "position_embedding_type": "mrope"}
    runs = interleaved(decoder.sections)
    vision = Vision(image, IMAGE_TEXT, depth, merge, runs, settings, MODULE, PROCESSOR, len(deep))
    return replace(description, dims=dims, model=model, vision=vision)


def _deepstack(tower: Fields, depth: int, layers: int) -> tuple[int, ...]:
    """The blocks of the tower whose outputs the decoder's first layers are given."""
    name = "deepstack_visual_indexes"
    indexes = tower.get(name, [8, 16, 24])
    blocks = [block for block in indexes if type(block) is int] if isinstance(indexes, list) else []
    if blocks != indexes or blocks != sorted({*blocks} & {*range(depth)}):
        raise ValueError(
            f"config.json: `{name}` = {indexes!r}, expected blocks of the tower's {depth} in ascending order"
        )
    if len(blocks) > layers:
        tower.refuse(name, indexes, f"the decoder has {layers} layers to add them to")
    return tuple(blocks)


def _norm(name: str, size: str = "v_hidden") -> list[Rule]:
    return [tower_rule(f"{name}.{part}", HFTensor(f"{_FILES}{name}.{part}", (size,))) for part in ("weight", "bias")]


def _merger(name: str, normed: str) -> list[Rule]:
    """`normed`: the size of what its norm normalises, one patch or those that become one output."""
    return [
        *_norm(f"{name}.norm", normed),
        *tower_linear(f"{name}.linear_fc1", "v_merged", "v_merged", files=_FILES),
        *tower_linear(f"{name}.linear_fc2", "hidden", "v_merged", files=_FILES),
    ]


def _tower_rules(config: HFConfig) -> list[Rule]:
    """One rule per tensor of the tower, whose depth the config says."""
    tower = Fields(Fields(config, _NAME).section(VISION), _TOWER)
    depth = tower.integer("depth", 27)
    proj, positions = f"{MODULE}.patch_embed.proj", f"{MODULE}.pos_embed.weight"
    patches = ("v_hidden", "v_channels", "v_frames", "v_patch", "v_patch")
    rules = [
        tower_rule(f"{proj}.weight", HFTensor(f"{_FILES}{proj}.weight", patches)),
        tower_rule(f"{proj}.bias", HFTensor(f"{_FILES}{proj}.bias", ("v_hidden",))),
        tower_rule(positions, HFTensor(_FILES + positions, ("v_positions", "v_hidden"))),
    ]
    for number in range(depth):
        block = f"{MODULE}.blocks.{number}"
        rules += [*_norm(f"{block}.norm1"), *_norm(f"{block}.norm2")]
        for name, rows, columns in (
            ("attn.qkv", "v_qkv", "v_hidden"),
            ("attn.proj", "v_hidden", "v_hidden"),
            ("mlp.linear_fc1", "v_ffn", "v_hidden"),
            ("mlp.linear_fc2", "v_hidden", "v_ffn"),
        ):
            rules += tower_linear(f"{block}.{name}", rows, columns, files=_FILES)
    rules += _merger(f"{MODULE}.merger", "v_hidden")
    deep = tower.get("deepstack_visual_indexes", [8, 16, 24])
    for number in range(len(deep) if isinstance(deep, list) else 0):  # of what is no list `describe` says so
        rules += _merger(f"{MODULE}.deepstack_merger_list.{number}", "v_merged")
    return rules


def _behind_tower(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The decoder's rules with the names that its tensors have beside a tower's, in files and in vLLM."""
    return tuple(
        replace(
            rule.renamed_in_engine("language_model.{}".format),
            hf=tuple(replace(tensor, name=_renamed(tensor.name)) for tensor in rule.hf),
        )
        for rule in rules
    )


def _renamed(name: str) -> str:
    return _DECODER + name.removeprefix("model.") if name.startswith("model.") else name


_DENSE = _behind_tower(decoder_rules(NORMS, ATTENTION, QK_NORMS, DENSE_MLP))
QWEN3_VL = Family(
    _NAME,
    ("Qwen3VLForConditionalGeneration",),
    _DENSE,
    _describe,
    module="deepstack",
    decoder=_DECODER,
    rules_of=lambda config: (*_DENSE, *_tower_rules(config)),
)
_MIXTURE = _behind_tower(decoder_rules(MOE_NORMS, ATTENTION, QK_NORMS, MOE))
QWEN3_VL_MOE = replace(
    QWEN3_VL,
    name="qwen3_vl_moe",
    architectures=("Qwen3VLMoeForConditionalGeneration",),
    rules=_MIXTURE,
    describe=_describe_mixture,
    rules_of=lambda config: (*_MIXTURE, *_tower_rules(config)),
    stacking=Stacking(transposed=True, interleaved=False),
)
