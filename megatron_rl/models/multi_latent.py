"""Multi-head latent attention as an object of a family: its weights, its sizes, its rotary embedding. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from megatron_rl.models.family import Settings
from megatron_rl.models.hf_config import Fields
from megatron_rl.models.rope import Rope, read_rope, yarn_mscale
from megatron_rl.models.rules import INPUT_NORM, MLP_NORM, Dims, Sharding, Slice, layer_rule

# Neither layer spec fuses the first norm into the product behind it, which two projections share; Transformer Engine's fuses
# those of the latents. Megatron-Core's local spec saves each norm under its own name here.
LATENT_INPUT_NORM = replace(INPUT_NORM, megatron=INPUT_NORM.megatron[:1])
LATENT_DENSE_NORMS = (LATENT_INPUT_NORM, replace(MLP_NORM, saved=MLP_NORM.megatron[:1]))
LATENT_MOE_NORMS = (LATENT_INPUT_NORM, replace(MLP_NORM, megatron=MLP_NORM.megatron[:1]))


_Q_NORM = layer_rule(
    ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
    Sharding.REPLICATED,
    ("self_attn.q_a_layernorm.weight", ("q_rank",)),
)
_KV_NORM = layer_rule(
    ("self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight"),
    Sharding.REPLICATED,
    ("self_attn.kv_a_layernorm.weight", ("kv_rank",)),
)
LATENT_ATTENTION = (
    layer_rule(
        "self_attention.linear_q_down_proj.weight",
        Sharding.DUPLICATED,
        ("self_attn.q_a_proj.weight", ("q_rank", "hidden")),
        engine="self_attn.fused_qkv_a_proj.weight",
    ),
    replace(_Q_NORM, saved=_Q_NORM.megatron[:1]),
    layer_rule(
        "self_attention.linear_q_up_proj.weight", Sharding.COLUMN, ("self_attn.q_b_proj.weight", ("q_up", "q_rank"))
    ),
    replace(
        layer_rule(
            "self_attention.linear_kv_down_proj.weight",
            Sharding.DUPLICATED,
            ("self_attn.kv_a_proj_with_mqa.weight", ("kv_down", "hidden")),
            engine="self_attn.fused_qkv_a_proj.weight",
        ),
        engine_after=("q_rank",),
    ),
    replace(_KV_NORM, saved=_KV_NORM.megatron[:1]),
    layer_rule(
        "self_attention.linear_kv_up_proj.weight", Sharding.COLUMN, ("self_attn.kv_b_proj.weight", ("kv_up", "kv_rank"))
    ),
    layer_rule("self_attention.linear_proj.weight", Sharding.ROW, ("self_attn.o_proj.weight", ("hidden", "values"))),
)


@dataclass(frozen=True)
class MultiLatent:
    """DeepSeek-AI 2024 (DeepSeek-V2, section 2.1): queries of `heads` heads come from a latent of `q_rank` numbers, keys and
    values of all of them from one of `kv_rank`, which alone an engine caches, with `rope` numbers that turn with
    the position.

    A head's query and key have `nope` numbers that do not turn and `rope` that do, its value has `value`.
    """

    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    config_class: ClassVar[str] = "MLATransformerConfig"
    unweighted: ClassVar[tuple[str, ...]] = ("self_attention.core_attention",)

    @property
    def dims(self) -> Dims:
        return {
            "q_rank": self.q_rank,
            "kv_rank": self.kv_rank,
            "q_up": self.heads * self.head_width,
            "kv_down": self.kv_rank + self.rope,
            "kv_up": self.heads * (self.nope + self.value),
            "values": self.heads * self.value,
        }

    @property
    def head_width(self) -> int:
        return self.nope + self.rope

    @property
    def output_numbers(self) -> int:
        return self.heads * self.value

    @property
    def kept_numbers(self) -> int:
        """Query, key, value and output, the last two padded to a key's width, and what the last product reads of it. The
        latents and the inputs of their norms are counted as if ranks shared them: they are 4 % of it in DeepSeek-V3."""
        return 4 * self.heads * self.head_width + self.heads * self.value + 2 * (self.q_rank + self.kv_rank) + self.rope

    @property
    def most_kept_numbers(self) -> int:
        return self.kept_numbers

    def cache_numbers(self, tensor: int) -> int:
        return self.kv_rank + self.rope  # whole on every rank

    def state_bytes(self, tensor: int, width: int) -> float:
        return 0.0

    def unfilled_bytes(self, tensor: int, width: int) -> float:
        return 0.0

    def products(self, hidden: int, tensor: int) -> list[tuple[float, float]]:
        sizes = self.dims
        return [
            (self.q_rank + sizes["kv_down"], hidden),
            (sizes["q_up"] / tensor, self.q_rank),
            (sizes["kv_up"] / tensor, self.kv_rank),
            (hidden, sizes["values"] / tensor),
        ]

    def operations(self, tokens: float, pairs: float, tensor: int) -> float:
        """Counted for heads that are written out, as training and the reading of prompts have them. An engine that decodes
        multiplies the latents instead, more operations on fewer bytes: its steps wait for memory."""
        return 2 * pairs * self.heads / tensor * (self.head_width + self.value)

    def moved_numbers(self, tensor: int) -> float:
        """The turned parts, their heads put together again, and the norms of the latents."""
        return 4 * self.heads * self.head_width / tensor + 2 * (self.q_rank + self.kv_rank)

    def sent_numbers(self, tensor: int) -> float:
        return 2 * self.heads * self.head_width / tensor

    def problems(self, tensor: int, key: str) -> Iterator[str]:
        if self.heads % tensor:
            yield (
                f"the model's attention heads ({self.heads}) must be a multiple of `{key}` ({tensor}): num_attention_heads "
                "in its config.json"
            )

    def engine_problems(self, tensor: int, key: str) -> Iterator[str]:
        return self.problems(tensor, key)

    def in_engine(self, tensor: int) -> MultiLatent:
        return self

    def engine_slices(self, rank: int, tensor: int) -> list[Slice]:
        raise ValueError("latent attention has no weight of Sharding.QKV")


def read_latents(fields: Fields) -> MultiLatent:
    """The sizes that config.json says; refuses models whose queries come from no latent."""
    if fields.get("q_lora_rank") is None:
        fields.refuse("q_lora_rank", None, "only models whose queries come from a latent are supported")
    heads = fields.integer("num_attention_heads")
    if (groups := fields.integer("num_key_value_heads", heads)) != heads:
        fields.refuse("num_key_value_heads", groups, f"every one of the {heads} heads has its own key and value")
    attention = MultiLatent(
        heads,
        q_rank=fields.integer("q_lora_rank"),
        kv_rank=fields.integer("kv_lora_rank"),
        nope=fields.integer("qk_nope_head_dim"),
        rope=fields.integer("qk_rope_head_dim"),
        value=fields.integer("v_head_dim"),
    )
    # What transformers derives from these and writes down.
    fields.only("qk_head_dim", attention.head_width)
    fields.only("head_dim", attention.rope)
    fields.only("rope_interleave", True)
    if attention.value > attention.head_width:
        fields.refuse(
            "v_head_dim", attention.value, "Megatron-Core pads a value to a key's width, so it must be smaller"
        )
    return attention


def latent_settings(attention: MultiLatent) -> Settings:
    """Fields of Megatron's configuration."""
    return {
        "q_lora_rank": attention.q_rank,
        "kv_lora_rank": attention.kv_rank,
        "qk_head_dim": attention.nope,
        "qk_pos_emb_head_dim": attention.rope,
        "v_head_dim": attention.value,
        "qk_layernorm": True,
    }


def latent_rope(fields: Fields, max_positions: int) -> tuple[Rope, Settings]:
    """The rotary embedding, and fields of Megatron's configuration: the default, or YaRN with DeepSeek's `mscale`, of which
    `mscale_all_dim` scales the scores of all dimensions."""
    rope = read_rope(fields, max_positions)
    if rope.kind not in ("default", "yarn"):
        fields.refuse("rope_type", rope.kind, "latent attention has default and yarn")
    if rope.mscale_all_dim and not rope.mscale:
        fields.refuse("mscale_all_dim", rope.mscale_all_dim, "transformers and vLLM differ where there is no mscale")
    both = bool(rope.mscale and rope.mscale_all_dim)
    mscale, all_dim = (rope.mscale, rope.mscale_all_dim) if both else (1.0, 0.0)
    if rope.attention_factor != yarn_mscale(rope.factor, mscale) / yarn_mscale(rope.factor, all_dim):
        fields.refuse(
            "attention_factor", rope.attention_factor, "only what follows from factor and mscale is supported"
        )
    if not rope.truncate:
        fields.refuse("truncate", rope.truncate, "Megatron-Core's latent attention makes the dimensions whole numbers")
    settings: Settings = {
        "rope_type": "yarn" if rope.kind == "yarn" else "rope",
        "rotary_base": rope.theta,
        "rotary_scaling_factor": rope.factor,
        "original_max_position_embeddings": rope.original or max_positions,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": mscale,
        "mscale_all_dim": all_dim,
    }
    return rope, settings
