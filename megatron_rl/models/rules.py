"""The weight map's vocabulary: what a Megatron parameter is made of, and how tensor parallelism cuts it.

Every kind of parameter comes down to one description: a Megatron shard is a list of *slices*, contiguous ranges of its
Hugging Face tensors along one dimension, laid end to end (and zero-padded, for the vocabulary). Loading copies the
slices in, exporting copies them out, so both directions follow from one function and cannot disagree. No torch: recipe
checks and the memory plan read it too; what moves tensors is in `weights`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from functools import cached_property
from itertools import accumulate

Dims = Mapping[str, int]  # sizes by symbol, e.g. {"hidden": 128, "q": 128, ...}; see `DIM_FIELDS`

# The field of config.json (or key of the recipe) behind each symbol, for error messages.
DIM_FIELDS: Mapping[str, str] = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "head_dim": "head_dim",
    "q": "num_attention_heads * head_dim",
    "kv": "num_key_value_heads * head_dim",
    "ffn": "intermediate_size",
    "experts": "num_experts",
    "expert_ffn": "moe_intermediate_size",
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "q_up": "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)",
    "kv_down": "kv_lora_rank + qk_rope_head_dim",
    "kv_up": "num_attention_heads * (qk_nope_head_dim + v_head_dim)",
    "values": "num_attention_heads * v_head_dim",
    "rank": "actor.lora.rank",  # of a recipe: see `lora`
    "labels": "num_labels",
    "q_gate": "2 * num_attention_heads * head_dim",  # of attention with output gates: see `gated_delta`
    "gd_key": "linear_num_key_heads * linear_key_head_dim",
    "gd_value": "linear_num_value_heads * linear_value_head_dim",
    "gd_mixed": "2 * linear_num_key_heads * linear_key_head_dim + linear_num_value_heads * linear_value_head_dim",
    "gd_heads": "linear_num_value_heads",
    "gd_head_dim": "linear_value_head_dim",
    "gd_kernel": "linear_conv_kernel_dim",
    "shared_ffn": "shared_expert_intermediate_size, or n_shared_experts * moe_intermediate_size",
    "one": "1",
    "v_hidden": "vision_config.hidden_size",
    "v_ffn": "vision_config.intermediate_size",
    "v_qkv": "3 * vision_config.hidden_size",
    "v_merged": "vision_config.hidden_size * spatial_merge_size**2",
    "v_channels": "vision_config.in_channels",
    "v_frames": "vision_config.temporal_patch_size",
    "v_patch": "vision_config.patch_size",
    "v_positions": "vision_config.num_position_embeddings",
}


class Place(IntEnum):
    """Where in the model a parameter is, in file order."""

    EMBEDDING = 0  # on the first pipeline stage
    LAYER = 1  # in decoder layers, on that layer's stage
    HEAD = 2  # after the layers, on the last stage


class Sharding(Enum):
    """How a parameter is cut over tensor-parallel ranks."""

    REPLICATED = "replicated"  # whole on every rank
    DUPLICATED = "duplicated"  # the same, of a matrix of attention
    COLUMN = "column"  # column-parallel linear: output rows, dim 0
    ROW = "row"  # row-parallel linear: input columns, dim 1
    VOCAB = "vocab"  # embedding and output layer: dim 0, zero-padded at the end
    QKV = "qkv"  # query, key, value interleaved by KV group, then cut along dim 0
    GATED = "gated"  # gate and up projection: each cut along dim 0, a rank holds its gate rows, then its up rows
    SECTIONS = "sections"  # several along dim 0, whole ones of each tensor: each cut, a rank holds its rows of all


@dataclass(frozen=True)
class HFTensor:
    """A Hugging Face tensor: its name (with `{layer}`, `{expert}`) and its shape in symbols of `DIM_FIELDS`."""

    name: str
    shape: tuple[str, ...]

    def sizes(self, dims: Dims) -> tuple[int, ...]:
        return tuple(dims[symbol] for symbol in self.shape)


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter and the Hugging Face tensors that it is made of.

    Attributes:
        megatron: its possible names, by layer spec; Transformer Engine's last, but for experts.
        saved: further names in distributed checkpoints (see `convert.layout`) that are no parameter's name.
        engine: for each tensor the name of vLLM's parameter (with `{layer}`), which holds those of one name one after the
            other along `dim`, and of experts all that a rank has, stacked; (): not known. `weights.layouts.EngineLayout`
            cuts it.
        engine_after: symbols of sizes along `dim`, of another rule's tensors that vLLM's parameter has before these.
        engine_interleaved: it has the first position of each tensor, then the second of each, and so on.
        engine_summed: vLLM adds up what its ranks compute with it: the first has it whole, the others zeros; where they have
            whole experts, each has that of its experts.
        layers: those that have it, by number; None: every layer.
        in_tower: it belongs to what stands in front of a decoder that reads images.
        sections: of a `Sharding.SECTIONS` rule, in the order of its rows: name, and size as a symbol.
        buffer: the module has it as a buffer of float32: it is loaded, saved and sent as a parameter is, and not trained.
    """

    megatron: tuple[str, ...]
    hf: tuple[HFTensor, ...]
    sharding: Sharding
    place: Place
    saved: tuple[str, ...] = ()
    engine: tuple[str, ...] = ()
    engine_after: tuple[str, ...] = ()
    engine_interleaved: bool = False
    engine_summed: bool = False
    layers: range | tuple[int, ...] | None = None
    buffer: bool = False
    in_tower: bool = False
    sections: tuple[tuple[str, str], ...] = ()

    @cached_property
    def per_layer(self) -> bool:
        return self.place is Place.LAYER

    def is_in(self, layer: int) -> bool:
        """Whether a decoder layer has it."""
        return self.per_layer and (self.layers is None or layer in self.layers)

    def layers_of(self, count: int) -> tuple[int, ...]:
        """The layers of a model of `count` that have it."""
        return tuple(layer for layer in range(count) if self.is_in(layer))

    @cached_property
    def per_expert(self) -> bool:
        return "{expert}" in self.megatron[0]

    def sections_of(self, tensor: int, dims: Dims) -> tuple[tuple[str, str], ...]:
        """The sections that one of its tensors has; none where it is not cut by sections."""
        start = sum(dims[other.shape[0]] for other in self.hf[:tensor])
        stop = start + dims[self.hf[tensor].shape[0]]
        ends = accumulate(dims[symbol] for _, symbol in self.sections)
        return tuple(section for section, end in zip(self.sections, ends, strict=True) if start < end <= stop)

    @property
    def is_output(self) -> bool:
        """Whether it is the output layer, which tied embeddings replace."""
        return self.place is Place.HEAD and self.sharding is Sharding.VOCAB

    @property
    def is_projection(self) -> bool:
        """Whether it is a matrix of attention, feed-forward or experts: what FP8 products read."""
        return self.sharding not in (Sharding.REPLICATED, Sharding.VOCAB) and len(self.hf[0].shape) == 2

    def width(self, itemsize: int) -> int:
        """Numbers of a model's dtype, of `itemsize` bytes, that have the bytes of one of its numbers."""
        return 4 // itemsize if self.buffer else 1

    @property
    def is_cut(self) -> bool:
        """Whether tensor-parallel ranks have parts of it."""
        return self.sharding not in (Sharding.REPLICATED, Sharding.DUPLICATED)

    @property
    def dim(self) -> int:
        """The dimension along which pieces are laid end to end."""
        return 1 if self.sharding is Sharding.ROW else 0

    @property
    def engine_step(self) -> int:
        """Positions of vLLM's parameter from one of a tensor's to the next."""
        return len(self.hf) if self.engine_interleaved else 1

    def renamed_in_engine(self, rename: Callable[[str], str]) -> Rule:
        """The same rule, where vLLM has other names for its modules."""
        return replace(self, engine=tuple(map(rename, self.engine)))

    def at(self, layer: int | None = None, expert: int | None = None) -> Rule:
        """The same rule with global layer and expert numbers filled into the Hugging Face names."""
        named = tuple(replace(t, name=t.name.format(layer=layer, expert=expert)) for t in self.hf)
        return replace(self, hf=named)

    @cached_property
    def patterns(self) -> tuple[re.Pattern[str], ...]:
        """Expressions that match the Megatron names, with groups `layer` and `expert` for local numbers."""
        number = {"{layer}": r"(?P<layer>\d+)", "{expert}": r"(?P<expert>\d+)"}

        def expression(name: str) -> str:
            return "".join(number.get(part, re.escape(part)) for part in re.split(r"(\{\w+\})", name))

        return tuple(re.compile(expression(name)) for name in self.megatron)


_LAYER, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."


def layer_rule(
    megatron: str | tuple[str, ...],
    sharding: Sharding,
    *hf: tuple[str, tuple[str, ...]],
    engine: str | tuple[str, ...] = "",
    sections: tuple[tuple[str, str], ...] = (),
) -> Rule:
    """A rule inside a decoder layer; names are relative to it. `engine`: one name for all tensors, or one for each; "" where
    vLLM has one tensor under its own name."""
    names = (megatron,) if isinstance(megatron, str) else megatron
    tensors = tuple(HFTensor(_HF + name, shape) for name, shape in hf)
    if not engine and len(hf) == 1:
        engine = hf[0][0]
    return Rule(
        tuple(_LAYER + name for name in names),
        tensors,
        sharding,
        Place.LAYER,
        engine=tuple(_HF + name for name in ((engine,) * len(hf) if isinstance(engine, str) else engine) if name),
        sections=sections,
    )


# A norm is a module of its own in the local layer spec; Transformer Engine's fuses it into the linear layer behind it.
INPUT_NORM = layer_rule(
    ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    Sharding.REPLICATED,
    ("input_layernorm.weight", ("hidden",)),
)
MLP_NORM = layer_rule(
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    Sharding.REPLICATED,
    ("post_attention_layernorm.weight", ("hidden",)),
)


@dataclass(frozen=True)
class Slice:
    """Rows (or columns) [start, stop) of the rule's `tensor`-th Hugging Face tensor."""

    tensor: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


def padded_vocab_size(vocab: int, tp: int) -> int:
    """The smallest vocabulary of at least `vocab` rows that tensor parallelism of `tp` divides."""
    return -(-vocab // tp) * tp


def _range(size: int, rank: int, parts: int, what: str) -> tuple[int, int]:
    if size % parts:
        raise ValueError(f"{what} = {size} does not divide over {parts} tensor-parallel ranks")
    part = size // parts
    return rank * part, (rank + 1) * part


def _qkv_range(rule: Rule, dims: Dims, rank: int, tp: int) -> tuple[int, int]:
    """Which of the interleaved rows [q of group 0, k 0, v 0, q of group 1, ...] shard `rank` holds.

    Megatron cuts them evenly, also where there are fewer KV groups than ranks: a shard may then start in the middle of a
    group.
    """
    heads, groups = dims["heads"], dims["kv_heads"]
    if heads % groups:
        raise ValueError(f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {groups}")
    if groups % tp and tp % groups:
        raise ValueError(
            f"num_key_value_heads = {groups} is neither a multiple nor a divisor of tensor parallelism {tp}"
        )
    if heads % tp:
        raise ValueError(f"num_attention_heads = {heads} does not divide over {tp} tensor-parallel ranks")
    rows = (heads * _query_parts(rule, dims) + 2 * groups) * dims["head_dim"]
    return _range(rows, rank, tp, "(num_attention_heads + 2 num_key_value_heads) head_dim")


def _qkv_slices(rule: Rule, dims: Dims, rank: int, tp: int) -> list[Slice]:
    """Rows of q, k and v in shard `rank`; with output gates, q's are [query of head 0, its gate, query of head 1, ...], and
    a group has all its queries, then all its gates."""
    low, high = _qkv_range(rule, dims, rank, tp)
    groups, unit, parts = dims["kv_heads"], dims["head_dim"], _query_parts(rule, dims)
    heads = dims["heads"] // groups
    slices = []
    for group in range(low // ((heads * parts + 2) * unit), groups):
        at = group * (heads * parts + 2) * unit
        if at >= high:
            break
        rows = [
            (0, (head * parts + part) * unit)
            for part in range(parts)
            for head in range(group * heads, (group + 1) * heads)
        ]
        for tensor, first in (*rows, (1, group * unit), (2, group * unit)):
            start, stop = max(low, at), min(high, at + unit)
            if start < stop:
                slices.append(Slice(tensor, first + start - at, first + stop - at))
            at += unit
    return _joined(slices)


def _query_parts(rule: Rule, dims: Dims) -> int:
    """2 where every query head has a gate beside it, else 1."""
    return dims[rule.hf[0].shape[0]] // (dims["heads"] * dims["head_dim"])


def _section_slices(rule: Rule, dims: Dims, rank: int, tp: int) -> list[Slice]:
    """A rank's rows of every section."""
    slices, tensor, start = [], 0, 0
    for _, symbol in rule.sections:
        low, high = _range(dims[symbol], rank, tp, DIM_FIELDS[symbol])
        slices.append(Slice(tensor, start + low, start + high))
        start += dims[symbol]
        if start == dims[rule.hf[tensor].shape[0]]:
            tensor, start = tensor + 1, 0
    return slices


def _joined(pieces: Sequence[Slice]) -> list[Slice]:
    joined: list[Slice] = []
    for piece in pieces:
        if joined and joined[-1].tensor == piece.tensor and joined[-1].stop == piece.start:
            joined[-1] = replace(joined[-1], stop=piece.stop)
        else:
            joined.append(piece)
    return joined


def shard_slices(rule: Rule, dims: Dims, rank: int, tp: int) -> list[Slice]:
    """Slices of which the shard of tensor-parallel rank `rank` of `tp` consists, in order along `rule.dim`.

    Raises:
        ValueError: the parameter does not divide over `tp` ranks; the message names the config field.
    """
    tensor = rule.hf[0]
    size = dims[tensor.shape[rule.dim]]
    field = DIM_FIELDS[tensor.shape[rule.dim]]
    if not rule.is_cut:
        return [Slice(index, 0, size) for index in range(len(rule.hf))]
    if rule.sharding is Sharding.QKV:
        return _qkv_slices(rule, dims, rank, tp)
    if rule.sharding is Sharding.SECTIONS:
        return _section_slices(rule, dims, rank, tp)
    if rule.sharding is Sharding.VOCAB:
        low, high = _range(dims.get("padded_vocab", padded_vocab_size(size, tp)), rank, tp, "the padded vocabulary")
        return [Slice(0, low, min(high, size))] if low < size else []
    low, high = _range(size, rank, tp, field)
    return [Slice(index, low, high) for index in range(len(rule.hf))]


def shard_shape(rule: Rule, dims: Dims, tp: int) -> tuple[int, ...]:
    """The shape of one tensor-parallel shard (all ranks have the same)."""
    shape = list(rule.hf[0].sizes(dims))
    if rule.sharding is Sharding.VOCAB:
        shape[0] = dims.get("padded_vocab", padded_vocab_size(shape[0], tp)) // tp
    elif rule.sharding is Sharding.QKV:
        low, high = _qkv_range(rule, dims, 0, tp)
        shape[0] = high - low
    else:
        shape[rule.dim] = sum(piece.length for piece in shard_slices(rule, dims, 0, tp))
    return tuple(shape)
