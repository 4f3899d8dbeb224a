"""Gated-delta layers among layers of grouped-query attention with output gates: their weights and sizes. No torch.

Yang et al. 2024, Gated Delta Networks. A gated-delta layer keeps a state of `key_dim` x `value_dim` numbers per value head
instead of keys and values of every token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from megatron_rl.models.attention import ATTENTION, QK_NORMS, GroupedQuery
from megatron_rl.models.experts import in_layers
from megatron_rl.models.rules import INPUT_NORM, Dims, HFTensor, Rule, Sharding, Slice, layer_rule

_MIXED = (("query", "gd_key"), ("key", "gd_key"), ("value", "gd_value"))
# Queries and their gates are one matrix in files, a head's query before its gate.
GATED_ATTENTION = (
    replace(
        ATTENTION[0],
        hf=(HFTensor(ATTENTION[0].hf[0].name, ("q_gate", "hidden")), *ATTENTION[0].hf[1:]),
    ),
    *ATTENTION[1:],
    *QK_NORMS,
)
# Names of sections are Megatron-Core's.
GATED_DELTA = (
    layer_rule(
        "self_attention.in_proj.weight",
        Sharding.SECTIONS,
        ("linear_attn.in_proj_qkv.weight", ("gd_mixed", "hidden")),
        ("linear_attn.in_proj_z.weight", ("gd_value", "hidden")),
        ("linear_attn.in_proj_b.weight", ("gd_heads", "hidden")),
        ("linear_attn.in_proj_a.weight", ("gd_heads", "hidden")),
        engine=(*("linear_attn.in_proj_qkvz.weight",) * 2, *("linear_attn.in_proj_ba.weight",) * 2),
        sections=(*_MIXED, ("z", "gd_value"), ("beta", "gd_heads"), ("alpha", "gd_heads")),
    ),
    layer_rule(
        "self_attention.conv1d.weight",
        Sharding.SECTIONS,
        ("linear_attn.conv1d.weight", ("gd_mixed", "one", "gd_kernel")),
        sections=_MIXED,
    ),
    layer_rule("self_attention.dt_bias", Sharding.COLUMN, ("linear_attn.dt_bias", ("gd_heads",))),
    layer_rule("self_attention.A_log", Sharding.COLUMN, ("linear_attn.A_log", ("gd_heads",))),
    layer_rule("self_attention.out_norm.weight", Sharding.REPLICATED, ("linear_attn.norm.weight", ("gd_head_dim",))),
    layer_rule("self_attention.out_proj.weight", Sharding.ROW, ("linear_attn.out_proj.weight", ("hidden", "gd_value"))),
)
# Transformer Engine fuses the norm into the product behind it, which has another name here.
_DELTA_NORM = replace(
    INPUT_NORM, megatron=(INPUT_NORM.megatron[0], "decoder.layers.{layer}.self_attention.in_proj.layer_norm_weight")
)


def attention_rules(linear: Sequence[bool]) -> tuple[Rule, ...]:
    """Input norms and attention of a decoder. `linear`: whether each layer is a gated-delta layer."""
    delta = tuple(layer for layer, is_linear in enumerate(linear) if is_linear)
    full = tuple(layer for layer, is_linear in enumerate(linear) if not is_linear)
    return in_layers((_DELTA_NORM, *GATED_DELTA), delta) + in_layers((INPUT_NORM, *GATED_ATTENTION), full)


@dataclass(frozen=True)
class GatedDelta:
    """The attention of a decoder: gated-delta layers, and others of attention with output gates.

    Attributes:
        full: attention of the other layers.
        layers, delta_layers: all, and those of them that are gated-delta layers.
        key_heads, value_heads, key_dim, value_dim, kernel: of a gated-delta layer: heads, numbers of a head, and tokens that
            its convolution reads.
    """

    full: GroupedQuery
    layers: int
    delta_layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    config_class: ClassVar[str] = "TransformerConfig"
    unweighted: ClassVar[tuple[str, ...]] = ("self_attention.core_attention",)

    @property
    def dims(self) -> Dims:
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return {
            **self.full.dims,
            "q_gate": 2 * self.full.dims["q"],
            "gd_key": keys,
            "gd_value": values,
            "gd_mixed": 2 * keys + values,
            "gd_heads": self.value_heads,
            "gd_head_dim": self.value_dim,
            "gd_kernel": self.kernel,
            "one": 1,
        }

    def _mean(self, full: float, delta: float) -> float:
        """The mean over all layers of a number per layer."""
        return (full * (self.layers - self.delta_layers) + delta * self.delta_layers) / self.layers

    @property
    def head_width(self) -> int:
        return self.full.head_width

    @property
    def output_numbers(self) -> int:
        return round(self._mean(self.full.output_numbers, self.dims["gd_value"]))

    @property
    def _full_kept(self) -> int:
        """Attention keeps its gates in fp32 too, and what they multiply."""
        return self.full.kept_numbers + 3 * self.dims["q"]

    @property
    def _delta_kept(self) -> int:
        """A gated-delta layer keeps what enters its convolution, in one tensor with gates and step sizes; queries and keys,
        normalised and repeated per value head; values; 64 products per head; the output, normalised and gated, in part in
        fp32; and small numbers per head."""
        dims, heads = self.dims, self.value_heads
        repeated = 2 * heads * self.key_dim
        return dims["gd_mixed"] + 2 * dims["gd_key"] + repeated + 9 * dims["gd_value"] + (66 + 9) * heads

    @property
    def kept_numbers(self) -> int:
        return round(self._mean(self._full_kept, self._delta_kept))

    @property
    def most_kept_numbers(self) -> int:
        return max(self._full_kept, self._delta_kept)

    def cache_numbers(self, tensor: int) -> int:
        return round(self._mean(self.full.cache_numbers(tensor), 0))

    def _layer_state(self, tensor: int, width: int) -> float:
        """Bytes of a gated-delta layer: what its convolution still reads, and a state in fp32."""
        read, state = (self.kernel - 1) * self.dims["gd_mixed"], self.value_heads * self.key_dim * self.value_dim
        return (read * width + state * 4) / tensor

    def state_bytes(self, tensor: int, width: int) -> float:
        return self._mean(0.0, self._layer_state(tensor, width))

    def unfilled_bytes(self, tensor: int, width: int) -> float:
        """vLLM's cache has pages of one size, so keys and values of the other layers are in pages as large as a state: half a
        page each is empty in the mean."""
        return self._mean(self._layer_state(tensor, width) / 2, 0.0)

    def products(self, hidden: int, tensor: int) -> list[tuple[float, float]]:
        full = [(columns, terms) for columns, terms in self.full.products(hidden, tensor)]
        gates = self.dims["q"] / tensor
        values = self.dims["gd_value"] / tensor
        entering = (self.dims["gd_mixed"] + self.dims["gd_value"] + 2 * self.value_heads) / tensor
        return [
            (self._mean(full[0][0] + gates, entering), hidden),
            (hidden, self._mean(full[1][1], values)),
        ]

    def operations(self, tokens: float, pairs: float, tensor: int) -> float:
        """A gated-delta layer's chunks of 64 tokens: four products among them, and three with the state."""
        heads, chunk = self.value_heads / tensor, 64
        within = 2 * chunk * (2 * self.key_dim + 2 * self.value_dim)
        state = 6 * self.key_dim * self.value_dim
        convolved = 2 * self.kernel * self.dims["gd_mixed"] / tensor
        return self._mean(self.full.operations(tokens, pairs, tensor), tokens * (heads * (within + state) + convolved))

    def moved_numbers(self, tensor: int) -> float:
        dims = self.dims
        delta = (4 * dims["gd_mixed"] + 3 * dims["gd_value"]) / tensor
        return self._mean(self.full.moved_numbers(tensor) + 3 * dims["q"] / tensor, delta)

    def sent_numbers(self, tensor: int) -> float:
        """Gated-delta layers exchange sequences for heads, and back."""
        delta = (self.dims["gd_mixed"] + 2 * self.dims["gd_value"] + 2 * self.value_heads) / tensor
        return self._mean(self.full.sent_numbers(tensor), delta)

    def _delta_problems(self, ranks: int, key: str) -> Iterator[str]:
        for what, field, count in (
            ("gated-delta key heads", "linear_num_key_heads", self.key_heads),
            ("gated-delta value heads", "linear_num_value_heads", self.value_heads),
        ):
            if count % ranks:
                yield f"the model's {what} ({count}) must be a multiple of `{key}` ({ranks}): {field} in its config.json"

    def context_problems(self, tensor: int, context: int) -> Iterator[str]:
        """Context-parallel ranks have whole sequences of some heads in a gated-delta layer."""
        if not [*self._delta_problems(tensor, "")]:
            yield from self._delta_problems(tensor * context, "actor.parallel.tensor` x `context")

    def problems(self, tensor: int, key: str) -> Iterator[str]:
        yield from self.full.problems(tensor, key)
        yield from self._delta_problems(tensor, key)

    def engine_problems(self, tensor: int, key: str) -> Iterator[str]:
        yield from self.full.engine_problems(tensor, key)
        yield from self._delta_problems(tensor, key)

    def in_engine(self, tensor: int) -> GatedDelta:
        return replace(self, full=self.full.in_engine(tensor))

    def engine_slices(self, rank: int, tensor: int) -> list[Slice]:
        """vLLM leaves a head's query and gate beside one another, as files have them."""
        queries, *others = self.full.engine_slices(rank, tensor)
        return [replace(queries, start=2 * queries.start, stop=2 * queries.stop), *others]
