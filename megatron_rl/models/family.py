"""A model family: its architectures, config mapping, weight map and module; and the rules that Llama-like decoders share.

No torch: recipe checks, the memory plan and conversion read the same declarations as the actor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_rl.models.attention import Attention, GroupedQuery
from megatron_rl.models.expert_stacks import Stacking
from megatron_rl.models.experts import Experts
from megatron_rl.models.hf_config import JSON, Fields, HFConfig
from megatron_rl.models.rope import Rope, read_rope
from megatron_rl.models.rules import DIM_FIELDS, INPUT_NORM, MLP_NORM, Dims, HFTensor, Place, Rule, Sharding, layer_rule

Setting = bool | int | float | str | list[int] | tuple[int, int]
Settings = dict[str, Setting]


@dataclass(frozen=True)
class Vision:
    """The vision tower in front of a decoder that reads images.

    Attributes:
        image_token: its id; a prompt has one for each output of the tower.
        image_text: what stands for one image in a prompt's text, with the image token once.
        depth: blocks of the tower.
        merge: rows, and columns, of patches that become one output.
        sections: runs of pairs of a head's dimensions that turn by time, height, width, time, and so on.
        tower: arguments of transformers' configuration of the tower.
        module: of the first chunk, under which the tower is.
        processor: the module of transformers with the image processor, and the processor's name in it.
        deepstack: so many of the decoder's layers, the first ones, have further outputs of the tower added to theirs.
    """

    image_token: int
    image_text: str
    depth: int
    merge: int
    sections: tuple[int, ...]
    tower: Mapping[str, JSON]
    module: str
    processor: tuple[str, str]
    deepstack: int = 0


@dataclass(frozen=True)
class ModelDescription:
    """A model in Megatron's terms.

    Attributes:
        dims: sizes by symbol (see `rules.DIM_FIELDS`), plus `layers`. A reward model has `labels`, which is 1.
        transformer: fields of `TransformerConfig` that the architecture decides (none of layout, dtype or speed);
            `activation_func` by name, see `gpt.ACTIVATIONS`.
        model: arguments of `GPTModel`; `vocab_size` is unpadded, see `rules.padded_vocab_size`.
        attention: that of every layer; its sizes are in `dims`.
        rope: how its queries and keys turn with their position.
        experts: None: every feed-forward is dense.
        vision: None: it reads text only.
        predictors: layers behind the decoder's in a model's files, which predict further tokens and are not read.
    """

    dims: Dims
    transformer: Settings
    model: Settings
    attention: Attention
    rope: Rope
    experts: Experts | None = None
    vision: Vision | None = None
    predictors: int = 0

    def with_experts(self, experts: Experts, settings: Mapping[str, Setting], predictors: int = 0) -> ModelDescription:
        """The description of a dense decoder with experts in its layers. `settings`: `transformer`'s that say so."""
        return replace(
            self,
            dims={**self.dims, **experts.dims},
            transformer={**self.transformer, **settings},
            experts=experts,
            predictors=predictors,
        )

    @property
    def tied(self) -> bool:
        return bool(self.model["share_embeddings_and_output_weights"])

    @property
    def max_positions(self) -> int:
        """Tokens of the longest sequence."""
        return int(str(self.model["max_sequence_length"]))


@dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
        describe: config.json to Megatron's terms; refuses what it does not understand.
        module: the file of `megatron_rl.modules` whose `build` makes this rank's chunks of the model.
        adapters: these are the rules of LoRA's adapters beside another family's weights (`lora.adapters_of`).
        decoder: before the names of the decoder's modules in transformers; in files their tensors are called `model.…`.
        rules_of: where config.json decides which rules there are, all of them; `family_for` returns the family with these.
        stacking: how its files have the experts of a layer in one tensor; None: each under names of its own, as in rules.
        is_inside: its published files also hold what is not read (`text_only`), and its experts stacked.
    """

    name: str
    architectures: tuple[str, ...]
    rules: tuple[Rule, ...]
    describe: Callable[[HFConfig], ModelDescription]
    module: str = "gpt"
    adapters: bool = False
    decoder: str = "model."
    rules_of: Callable[[HFConfig], tuple[Rule, ...]] | None = None
    stacking: Stacking | None = None
    is_inside: bool = False

    @property
    def embedding(self) -> Rule:
        return next(rule for rule in self.rules if rule.place is Place.EMBEDDING and rule.sharding is Sharding.VOCAB)

    @property
    def output(self) -> Rule:
        return next(rule for rule in self.rules if rule.is_output)


@dataclass(frozen=True, eq=False)
class Model:
    """One model of a family. Equal to itself alone, so that what is counted of it can be remembered."""

    family: Family
    description: ModelDescription

    @property
    def dims(self) -> Dims:
        return self.description.dims

    @property
    def attention(self) -> Attention:
        return self.description.attention

    @property
    def experts(self) -> Experts | None:
        return self.description.experts

    @property
    def expert_count(self) -> int:
        """Experts of each layer that has some; 0 where there are none."""
        return 0 if self.experts is None else self.experts.count

    @property
    def said_experts(self) -> str:
        """Returns the number of experts for a message, by the name that config.json has for it."""
        return f"{'num_experts' if self.experts is None else self.experts.field} = {self.expert_count}"

    def said(self, symbol: str) -> str:
        """Returns a size for a message, by the names that config.json has for it."""
        return self.said_experts if symbol == "experts" else f"{DIM_FIELDS[symbol]} = {self.dims[symbol]}"

    @cached_property
    def expert_layers(self) -> frozenset[int]:
        """The layers whose feed-forwards are experts."""
        rules = (rule for rule in self.family.rules if rule.per_expert)
        return frozenset(layer for rule in rules for layer in rule.layers_of(self.dims["layers"]))

    @property
    def expert_numbers(self) -> int:
        """Numbers in all experts' matrices."""
        return len(self.expert_layers) * self.experts.numbers(self.dims["hidden"]) if self.experts else 0

    @property
    def expert_share(self) -> float:
        """The share of the layers whose feed-forwards are experts."""
        return len(self.expert_layers) / self.dims["layers"]

    @property
    def is_uniform(self) -> bool:
        """Whether every layer has the same weights."""
        return all(rule.layers is None for rule in self.family.rules)

    def in_engine(self, tensor: int) -> Model:
        """The model with what an engine of `tensor` ranks repeats: its sizes divided by `tensor` are those of a rank."""
        attention = self.attention.in_engine(tensor)
        dims = {**self.dims, **attention.dims}
        return replace(self, description=replace(self.description, dims=dims, attention=attention))

    @property
    def parameters(self) -> tuple[Rule, ...]:
        """The rules that it has weights for: all, without the output layer where it is tied."""
        return tuple(rule for rule in self.family.rules if not (rule.is_output and self.description.tied))

    @property
    def has_expert_biases(self) -> bool:
        """Whether its routers choose experts by scores with a bias for each."""
        return bool(self.description.transformer.get("moe_router_enable_expert_bias"))

    def is_skipped(self, name: str) -> bool:
        """Whether a tensor in the model's files belongs to layers behind the decoder's, which predict further tokens."""
        first = self.dims["layers"]
        return any(name.startswith(f"model.layers.{first + number}.") for number in range(self.description.predictors))

    def weights(self) -> Iterator[Rule]:
        """Every parameter and mapped buffer in file order, names filled in; a tied output layer is left out."""
        return (rule for rule, _, _ in self.numbered())

    def numbered(self) -> Iterator[tuple[Rule, int | None, int | None]]:
        """`weights`, each with its layer and its expert (None where it has none)."""
        rules = self.parameters
        yield from ((rule, None, None) for rule in rules if rule.place is Place.EMBEDDING)
        for layer in range(self.dims["layers"]):
            for rule in rules:
                if rule.is_in(layer):
                    experts = range(self.expert_count) if rule.per_expert else [None]
                    yield from ((rule.at(layer, expert), layer, expert) for expert in experts)
        yield from ((rule, None, None) for rule in rules if rule.place is Place.HEAD)


# --------------------------------------------------------------------------------- rules that Llama-like decoders share
EMBEDDING = Rule(
    ("embedding.word_embeddings.weight",),
    (HFTensor("model.embed_tokens.weight", ("vocab", "hidden")),),
    Sharding.VOCAB,
    Place.EMBEDDING,
    engine=("model.embed_tokens.weight",),
)
FINAL_NORM = Rule(
    ("decoder.final_layernorm.weight",),
    (HFTensor("model.norm.weight", ("hidden",)),),
    Sharding.REPLICATED,
    Place.HEAD,
    engine=("model.norm.weight",),
)
OUTPUT = Rule(
    ("output_layer.weight",),
    (HFTensor("lm_head.weight", ("vocab", "hidden")),),
    Sharding.VOCAB,
    Place.HEAD,
    engine=("lm_head.weight",),
)
NORMS = (INPUT_NORM, MLP_NORM)
DENSE_MLP = (
    layer_rule(
        "mlp.linear_fc1.weight",
        Sharding.GATED,
        ("mlp.gate_proj.weight", ("ffn", "hidden")),
        ("mlp.up_proj.weight", ("ffn", "hidden")),
        engine="mlp.gate_up_proj.weight",
    ),
    layer_rule("mlp.linear_fc2.weight", Sharding.ROW, ("mlp.down_proj.weight", ("hidden", "ffn"))),
)


def decoder_rules(*layer: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The weight map of a decoder with these rules in its layers."""
    return (EMBEDDING, *(rule for rules in layer for rule in rules), FINAL_NORM, OUTPUT)


def describe_decoder(
    fields: Fields,
    *,
    head_dim: int | None = None,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    biases: bool = False,
    activation: str = "silu",
    tied: bool = False,
    rotary_share: float | None = None,
) -> ModelDescription:
    """The config mapping of Llama-like decoders. The caller reads its family's own fields and calls `fields.finish`.

    Args:
        head_dim: the family's default; None: hidden_size / num_attention_heads.
        qk_norm: queries and keys are RMS-normalised per head.
        qkv_bias: the query, key and value projections have a bias.
        biases: all matrices of a layer have one.
        activation: of the gated feed-forward, as config.json names it.
        tied: whether the output layer is the embedding where config.json does not say.
        rotary_share: of a head's dimensions that turn, see `rope.read_rope`.
    """
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    layers, ffn = fields.integer("num_hidden_layers"), fields.integer("intermediate_size")
    kv_heads, vocab = fields.integer("num_key_value_heads", heads), fields.integer("vocab_size")
    head_dim = fields.integer("head_dim", head_dim or hidden // heads)
    max_positions = fields.integer("max_position_embeddings")
    fields.only("hidden_act", activation)
    fields.only("attention_dropout", 0.0)
    fields.only("attention_bias", biases)
    fields.only("mlp_bias", False)
    fields.quantisation()
    attention, rope = GroupedQuery(heads, kv_heads, head_dim, qk_norm), read_rope(fields, max_positions, rotary_share)
    dims = {
        "layers": layers,
        "vocab": vocab,
        "hidden": hidden,
        **attention.dims,
        "ffn": ffn,
    }
    transformer: Settings = {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "num_query_groups": kv_heads,
        "kv_channels": head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": fields.number("rms_norm_eps", 1e-6),
        "qk_layernorm": qk_norm,
        "add_bias_linear": biases,
        "add_qkv_bias": qkv_bias or biases,
        "gated_linear_unit": True,
        "activation_func": activation,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        **rope.softmax_scale(head_dim),
    }
    model: Settings = {
        "vocab_size": vocab,
        "max_sequence_length": max_positions,
        "share_embeddings_and_output_weights": fields.flag("tie_word_embeddings", tied),
        **rope.arguments(),
    }
    return ModelDescription(dims, transformer, model, attention, rope)


def sliding_window(fields: Fields) -> int | None:
    """Tokens that attention sees in a sliding layer; None: all."""
    found = 4096 if fields.absent("sliding_window") else fields.get("sliding_window")
    return None if found is None else fields.integer("sliding_window", found)


def refuse_sliding_window(fields: Fields, layers: int) -> None:
    """Qwen2 and Qwen3: `layer_types`, or else the layers from `max_window_layers` up where `use_sliding_window`."""
    window = sliding_window(fields)
    first = fields.number("max_window_layers", 28)
    types = fields.names("layer_types")
    if types is None and fields.flag("use_sliding_window", False) and window is not None and first < layers:
        fields.refuse("use_sliding_window", True, f"layers from max_window_layers = {first} would not attend fully")
    if any(kind != "full_attention" for kind in types or []):
        fields.refuse("layer_types", types, "every layer must use full attention")
    fields.flag("use_sliding_window", False)
