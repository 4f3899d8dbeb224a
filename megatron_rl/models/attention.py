"""Attention as an object of a family: its weights, and its sizes in everything that is planned, checked or cut. No torch.

Another kind of attention is another file like this one: rules of its weights, and a class with the members of `Attention`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from megatron_rl.models.rules import Dims, Sharding, Slice, layer_rule


class Attention(Protocol):
    """One layer's attention; where layers differ, the mean over them.

    Numbers are counted per token. `tensor`: ranks that share the heads.

    Attributes:
        config_class: the class of `megatron.core.transformer` that a model with it is configured by.
        unweighted: modules without weights, named as in a layer's rules, of which Transformer Engine saves a state.
    """

    config_class: ClassVar[str]
    unweighted: ClassVar[tuple[str, ...]]

    @property
    def dims(self) -> Dims:
        """Sizes by the symbols of its rules."""

    @property
    def head_width(self) -> int:
        """Numbers of one head, as kernels must support it."""

    @property
    def output_numbers(self) -> int:
        """Numbers that the product after it reads, all heads together."""

    @property
    def kept_numbers(self) -> int:
        """Numbers that fused attention keeps for the backward pass, all heads together: its inputs and its output, and
        what norms of its inputs keep."""

    @property
    def most_kept_numbers(self) -> int:
        """`kept_numbers` of the layer that keeps most."""

    def cache_numbers(self, tensor: int) -> int:
        """Numbers of a token in the cache of each rank of an engine."""

    def state_bytes(self, tensor: int, width: int) -> float:
        """Bytes of a sequence's state in the cache of each rank of an engine, whatever its tokens; a decoding step reads and
        writes it. `width`: bytes of a number of the model's."""

    def unfilled_bytes(self, tensor: int, width: int) -> float:
        """Bytes of the cache's pages that a sequence has and does not fill, in the mean, where pages are large."""

    def products(self, hidden: int, tensor: int) -> list[tuple[float, float]]:
        """Columns and terms of its matrix products on a rank; rows are tokens."""

    def operations(self, tokens: float, pairs: float, tensor: int) -> float:
        """Operations of a forward pass between its matrix products, on a rank. `pairs`: of query and key."""

    def moved_numbers(self, tensor: int) -> float:
        """Numbers that rotation and norms read and write on a rank."""

    def sent_numbers(self, tensor: int) -> float:
        """Numbers that a rank sends to each other one among which sequences are cut."""

    def problems(self, tensor: int, key: str) -> Iterator[str]:
        """A sentence per reason why Megatron-Core cannot cut it so, with the recipe's key for `tensor`."""

    def engine_problems(self, tensor: int, key: str) -> Iterator[str]:
        """The same of an engine."""

    def in_engine(self, tensor: int) -> Attention:
        """Returns the sizes with what an engine repeats where ranks outnumber it: divided by `tensor`, its sizes are those
        of a rank."""

    def engine_slices(self, rank: int, tensor: int) -> list[Slice]:
        """The parts of a `Sharding.QKV` rule that a rank of an engine has, in the order of its parameter."""


# ----------------------------------------------------------------------------------------------- grouped-query attention
ATTENTION = (
    layer_rule(
        "self_attention.linear_qkv.weight",
        Sharding.QKV,
        ("self_attn.q_proj.weight", ("q", "hidden")),
        ("self_attn.k_proj.weight", ("kv", "hidden")),
        ("self_attn.v_proj.weight", ("kv", "hidden")),
        engine="self_attn.qkv_proj.weight",
    ),
    layer_rule("self_attention.linear_proj.weight", Sharding.ROW, ("self_attn.o_proj.weight", ("hidden", "q"))),
)
QKV_BIAS = (
    layer_rule(
        "self_attention.linear_qkv.bias",
        Sharding.QKV,
        ("self_attn.q_proj.bias", ("q",)),
        ("self_attn.k_proj.bias", ("kv",)),
        ("self_attn.v_proj.bias", ("kv",)),
        engine="self_attn.qkv_proj.bias",
    ),
)
QK_NORMS = (
    layer_rule("self_attention.q_layernorm.weight", Sharding.REPLICATED, ("self_attn.q_norm.weight", ("head_dim",))),
    layer_rule("self_attention.k_layernorm.weight", Sharding.REPLICATED, ("self_attn.k_norm.weight", ("head_dim",))),
)


@dataclass(frozen=True)
class GroupedQuery:
    """Ainslie et al. 2023 (GQA): `kv_heads` keys and values for `heads` queries, all of `head_dim` numbers; one of each is
    multi-query attention, as many are multi-head attention.

    `qk_norm`: queries and keys are normalised, each head by itself.
    """

    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool = False
    config_class: ClassVar[str] = "TransformerConfig"
    unweighted: ClassVar[tuple[str, ...]] = ("self_attention.core_attention",)

    @property
    def dims(self) -> Dims:
        return {
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "q": self.heads * self.head_dim,
            "kv": self.kv_heads * self.head_dim,
        }

    @property
    def head_width(self) -> int:
        return self.head_dim

    @property
    def output_numbers(self) -> int:
        return self.dims["q"]

    @property
    def kept_numbers(self) -> int:
        queries, keys = self.dims["q"], self.dims["kv"]
        return 2 * queries + 2 * keys + (queries + keys if self.qk_norm else 0)

    @property
    def most_kept_numbers(self) -> int:
        return self.kept_numbers

    def cache_numbers(self, tensor: int) -> int:
        return 2 * self.in_engine(tensor).dims["kv"] // tensor

    def state_bytes(self, tensor: int, width: int) -> float:
        return 0.0

    def unfilled_bytes(self, tensor: int, width: int) -> float:
        return 0.0

    def _on_rank(self, tensor: int) -> tuple[float, float]:
        """Numbers of queries, and of keys."""
        return self.dims["q"] / tensor, self.dims["kv"] / tensor

    def products(self, hidden: int, tensor: int) -> list[tuple[float, float]]:
        queries, keys = self._on_rank(tensor)
        return [(queries + 2 * keys, hidden), (hidden, queries)]

    def operations(self, tokens: float, pairs: float, tensor: int) -> float:
        return 4 * pairs * self._on_rank(tensor)[0]  # two products of two operations each

    def moved_numbers(self, tensor: int) -> float:
        return 4 * sum(self._on_rank(tensor))

    def sent_numbers(self, tensor: int) -> float:
        return 2 * self._on_rank(tensor)[1]

    def problems(self, tensor: int, key: str) -> Iterator[str]:
        for what, field, count in (
            ("attention heads", "num_attention_heads", self.heads),
            ("key/value heads", "num_key_value_heads", self.kv_heads),
        ):
            if count % tensor:
                yield f"the model's {what} ({count}) must be a multiple of `{key}` ({tensor}): {field} in its config.json"

    def engine_problems(self, tensor: int, key: str) -> Iterator[str]:
        if self.heads % tensor:
            yield (
                f"the model's attention heads ({self.heads}) must be a multiple of `{key}` ({tensor}): num_attention_heads "
                "in its config.json"
            )
        elif self.kv_heads % tensor and tensor % self.kv_heads:
            yield (
                f"`{key}` ({tensor}) must divide the model's {self.kv_heads} key/value heads (num_key_value_heads in its "
                "config.json), or be a multiple of them"
            )

    def in_engine(self, tensor: int) -> GroupedQuery:
        return replace(self, kv_heads=max(1, self.kv_heads // tensor) * tensor)

    def engine_slices(self, rank: int, tensor: int) -> list[Slice]:
        """vLLM's QKVParallelLinear does not interleave them."""
        if problem := next(self.engine_problems(tensor, "tensor"), None):
            raise ValueError(problem)
        queries, copies = self.heads // tensor * self.head_dim, max(1, tensor // self.kv_heads)
        rows = max(1, self.kv_heads // tensor) * self.head_dim
        first = rank // copies * rows
        return [
            Slice(0, rank * queries, (rank + 1) * queries),
            *(Slice(index, first, first + rows) for index in (1, 2)),
        ]
