"""What a model family is: its architectures, its config mapping and its weight map; and what all decoders share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.nn.functional import silu

from megatron_rl.models.hf_config import Fields, HFConfig, rope_arguments
from megatron_rl.models.rules import Dims, HFTensor, Kind, Rule


@dataclass(frozen=True)
class ModelDescription:
    """A model in Megatron's terms.

    Attributes:
        dims: sizes by symbol (see `rules.DIM_FIELDS`), plus `layers`, `heads`, `kv_heads`; dense: 0 `experts`.
        transformer: fields of `TransformerConfig` that the architecture decides (none of layout, dtype or speed).
        model: arguments of `GPTModel`; `vocab_size` is unpadded, see `rules.padded_vocab_size`.
        spec: arguments of Megatron's layer spec functions that the architecture decides.
    """

    dims: Dims
    transformer: dict[str, Any]
    model: dict[str, Any]
    spec: dict[str, Any] = field(default_factory=dict)

    @property
    def tied(self) -> bool:
        """True where the output layer is the embedding."""
        return bool(self.model["share_embeddings_and_output_weights"])


@dataclass(frozen=True)
class Family:
    """One family of models; `describe` maps config.json to Megatron, refusing what it does not understand."""

    name: str
    architectures: tuple[str, ...]
    rules: tuple[Rule, ...]
    describe: Callable[[HFConfig], ModelDescription]

    def weights(self, description: ModelDescription) -> Iterator[Rule]:
        """Every parameter of the model in file order, names filled in; a tied output layer is left out."""
        return (rule for rule, _, _ in self.numbered(description))

    def numbered(self, description: ModelDescription) -> Iterator[tuple[Rule, int | None, int | None]]:
        """`weights`, each with its layer and its expert (None where it has none)."""
        layered = [rule for rule in self.rules if rule.per_layer]
        first = self.rules.index(layered[0])
        yield from ((rule, None, None) for rule in self.rules[:first])
        for layer in range(description.dims["layers"]):
            for rule in layered:
                experts = range(description.dims["experts"]) if rule.per_expert else [None]
                yield from ((rule.at(layer, expert), layer, expert) for expert in experts)
        for rule in self.rules[first + len(layered) :]:
            if not (rule is OUTPUT and description.tied):
                yield rule, None, None


# --------------------------------------------------------------------------------- rules that Llama-like decoders share
_LAYER, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."

EMBEDDING = Rule(
    ("embedding.word_embeddings.weight",), (HFTensor("model.embed_tokens.weight", ("vocab", "hidden")),), Kind.VOCAB
)
FINAL_NORM = Rule(("decoder.final_layernorm.weight",), (HFTensor("model.norm.weight", ("hidden",)),), Kind.REPLICATED)
OUTPUT = Rule(("output_layer.weight",), (HFTensor("lm_head.weight", ("vocab", "hidden")),), Kind.VOCAB)
# The last pipeline stage's own copy of tied embeddings: loaded, never exported.
TIED_OUTPUT = Rule(OUTPUT.megatron, EMBEDDING.hf, Kind.VOCAB)


def layer_rule(megatron: str | tuple[str, ...], kind: Kind, *hf: tuple[str, tuple[str, ...]]) -> Rule:
    """A rule inside a decoder layer; names are relative to it."""
    names = (megatron,) if isinstance(megatron, str) else megatron
    tensors = tuple(HFTensor(_HF + name, shape) for name, shape in hf)
    return Rule(tuple(_LAYER + name for name in names), tensors, kind)


# A norm is a module of its own in the local layer spec; Transformer Engine's fuses it into the linear layer behind it.
NORMS = (
    layer_rule(
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        Kind.REPLICATED,
        ("input_layernorm.weight", ("hidden",)),
    ),
    layer_rule(
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        Kind.REPLICATED,
        ("post_attention_layernorm.weight", ("hidden",)),
    ),
)
ATTENTION = (
    layer_rule(
        "self_attention.linear_qkv.weight",
        Kind.QKV,
        ("self_attn.q_proj.weight", ("q", "hidden")),
        ("self_attn.k_proj.weight", ("kv", "hidden")),
        ("self_attn.v_proj.weight", ("kv", "hidden")),
    ),
    layer_rule("self_attention.linear_proj.weight", Kind.ROW, ("self_attn.o_proj.weight", ("hidden", "q"))),
)
QKV_BIAS = (
    layer_rule(
        "self_attention.linear_qkv.bias",
        Kind.QKV,
        ("self_attn.q_proj.bias", ("q",)),
        ("self_attn.k_proj.bias", ("kv",)),
        ("self_attn.v_proj.bias", ("kv",)),
    ),
)
QK_NORMS = (
    layer_rule("self_attention.q_layernorm.weight", Kind.REPLICATED, ("self_attn.q_norm.weight", ("head_dim",))),
    layer_rule("self_attention.k_layernorm.weight", Kind.REPLICATED, ("self_attn.k_norm.weight", ("head_dim",))),
)
DENSE_MLP = (
    layer_rule(
        "mlp.linear_fc1.weight",
        Kind.GATED,
        ("mlp.gate_proj.weight", ("ffn", "hidden")),
        ("mlp.up_proj.weight", ("ffn", "hidden")),
    ),
    layer_rule("mlp.linear_fc2.weight", Kind.ROW, ("mlp.down_proj.weight", ("hidden", "ffn"))),
)


def decoder_rules(*layer: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The weight map of a decoder with these rules in every layer."""
    return (EMBEDDING, *(rule for rules in layer for rule in rules), FINAL_NORM, OUTPUT)


def describe_decoder(
    fields: Fields, *, head_dim: int | None = None, qk_norm: bool = False, qkv_bias: bool = False
) -> ModelDescription:
    """The config mapping of Llama-like decoders. The caller reads its family's own fields and calls `fields.finish`.

    Args:
        head_dim: the family's default; None: hidden_size / num_attention_heads.
        qk_norm: queries and keys are RMS-normalised per head.
        qkv_bias: the query, key and value projections have a bias.
    """
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    layers, ffn = fields.integer("num_hidden_layers"), fields.integer("intermediate_size")
    kv_heads, vocab = fields.integer("num_key_value_heads", heads), fields.integer("vocab_size")
    head_dim = fields.integer("head_dim", head_dim or hidden // heads)
    max_positions = fields.integer("max_position_embeddings")
    fields.only("hidden_act", "silu")
    fields.only("attention_dropout", 0.0)
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    if fields.get("quantization_config"):
        fields.refuse("quantization_config", "...", "the weights must be those of the unquantised model")
    dims = {
        "layers": layers,
        "experts": 0,
        "vocab": vocab,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "q": heads * head_dim,
        "kv": kv_heads * head_dim,
        "ffn": ffn,
    }
    transformer = {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "num_query_groups": kv_heads,
        "kv_channels": head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": fields.number("rms_norm_eps", 1e-6),
        "qk_layernorm": qk_norm,
        "add_bias_linear": False,
        "add_qkv_bias": qkv_bias,
        "gated_linear_unit": True,
        "activation_func": silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    model = {
        "vocab_size": vocab,
        "max_sequence_length": max_positions,
        "share_embeddings_and_output_weights": fields.flag("tie_word_embeddings", False),
        **rope_arguments(fields, max_positions),
    }
    return ModelDescription(dims, transformer, model, {"qk_layernorm": qk_norm})


def refuse_sliding_window(fields: Fields, layers: int) -> None:
    """Qwen2 and Qwen3: `layer_types`, or else the layers from `max_window_layers` up where `use_sliding_window`."""
    window = 4096 if fields.absent("sliding_window") else fields.get("sliding_window")
    first = fields.get("max_window_layers", 28)
    types = fields.get("layer_types")
    if types is None and fields.flag("use_sliding_window", False) and window is not None and first < layers:
        fields.refuse("use_sliding_window", True, f"layers from max_window_layers = {first} would not attend fully")
    if any(kind != "full_attention" for kind in types or []):
        fields.refuse("layer_types", types, "every layer must use full attention")
    fields.flag("use_sliding_window", False)
