"""Names of a model's tensors in Megatron-Core's distributed checkpoints, and how a layout cuts them.

In such a checkpoint a parameter is one *global* tensor, whatever layout wrote it: layers are stacked along a first
dimension (`decoder.layers.mlp.linear_fc2.weight` is [layers, hidden, ffn]), experts along a second one, and a gated
projection is all gate rows, then all up rows. What a layout decides is only into which chunks the file cuts the global
tensor, and how many rows pad the vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_rl.base.messages import errors_named
from megatron_rl.config.pipeline_split import stage_layers
from megatron_rl.models.family import Model
from megatron_rl.models.rules import Dims, Place, Rule, Sharding, Slice, padded_vocab_size, shard_shape, shard_slices


@dataclass(frozen=True)
class Layout:
    """Parallel sizes; what a checkpoint is cut for. Any other layout reads it too, only in less convenient pieces."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1

    def tensor_of(self, rule: Rule) -> int:
        """The number of ranks that a rule's parameter is cut over."""
        return self.expert_tensor if rule.per_expert else self.tensor

    def check(self, model: Model) -> None:
        """Refuses a layout that the model cannot be trained at.

        Raises:
            ValueError: naming the size, the config's field and the option.
        """
        for option in ("tensor", "pipeline", "expert", "expert_tensor"):
            if (value := getattr(self, option)) < 1:
                raise ValueError(f"--{option.replace('_', '-')} {value}: must be at least 1")
        layers, experts = model.dims["layers"], model.expert_count
        with errors_named(f"--pipeline {self.pipeline}: num_hidden_layers = {layers}"):
            stage_layers(layers, self.pipeline)
        for option, value in (("expert", self.expert), ("expert-tensor", self.expert_tensor)):
            if value > 1 and experts == 0:
                raise ValueError(f"--{option} {value}: the model has no experts")
        if experts % self.expert:
            raise ValueError(f"--expert {self.expert}: num_experts = {experts} does not divide over it")
        for rule in model.family.rules:
            try:
                shard_slices(rule, model.dims, 0, self.tensor_of(rule))
            except ValueError as error:
                option = "expert-tensor" if rule.per_expert else "tensor"
                raise ValueError(f"--{option} {self.tensor_of(rule)}: {error}") from None


@dataclass(frozen=True)
class TensorChunk:
    """A part of a global tensor that is written, and read, in one go.

    It is made of `slices` of the rule's Hugging Face tensors, end to end along `rule.dim`; where these end before the chunk
    does, zeros follow (padding of the vocabulary).
    """

    name: str  # of the global tensor
    aliases: tuple[str, ...]  # further names of it
    shape: tuple[int, ...]
    start: tuple[int, ...]  # of the part in it
    size: tuple[int, ...]  # of the part; leading dimensions (layer, expert) have size 1
    rule: Rule  # with names filled in
    slices: tuple[Slice, ...]
    stage: int  # the pipeline rank that holds it
    expert_rank: int  # the expert-parallel rank that holds it; -1 where all do

    @property
    def matrix(self) -> tuple[int, ...]:
        """The size without the leading dimensions."""
        return self.size[-len(self.rule.hf[0].shape) :]

    @property
    def numel(self) -> int:
        return math.prod(self.size)


def _modules(name: str) -> str:
    """A parameter's name with experts as distributed checkpoints have them: a module per expert."""
    return name.replace("local_experts.{expert}.", "experts.{expert}.")


def _stacked(name: str, layer: int | None = None) -> str:
    number = "" if layer is None else f"{layer}."
    return _modules(name).replace("{layer}.", number).replace("{expert}.", "")


def global_name(rule: Rule, layer: int | None = None) -> str:
    """The name under which both layer specs look for a parameter (but see `aliases`); where layers are not stacked, in one
    layer."""
    # A norm's last name is Transformer Engine's, under which the local spec saves it too; an expert's first one has
    # a module per expert.
    return _stacked(rule.megatron[0] if rule.per_expert else rule.megatron[-1], layer)


def aliases(rule: Rule, layer: int | None = None) -> tuple[str, ...]:
    """Further names of a global tensor, which point to the same bytes."""
    return tuple(_stacked(name, layer) for name in rule.saved)


def known_names(rule: Rule) -> Iterator[str]:
    """Every global name that a rule's parameter is found under, with `{layer}` and `{expert}` where these are not stacked.

    Besides the usual form there are checkpoints with a tensor per layer, and with one per expert (whose gate and up
    projection are then tensors of their own, `..._w` and `..._v`).
    """
    names = rule.megatron[:1] if rule.per_expert else (rule.megatron[-1], *rule.megatron[:-1])
    for name in map(_modules, names):
        yield from dict.fromkeys((_stacked(name), name.replace("{expert}.", ""), name))
        if rule.sharding is Sharding.GATED:
            yield name + "_w"
        if rule.sections:  # of which each is a tensor of its own
            yield next(iter(section_names(rule, name)))


def section_names(rule: Rule, name: str) -> tuple[str, ...]:
    """The global tensors of a rule with sections, one each; `name`: of its parameter."""
    return tuple(f"{name}.{section}" for section, _ in rule.sections)


def leading(rule: Rule, model: Model) -> tuple[int, ...]:
    """The dimensions that a global tensor has before the parameter's own. Megatron-Core stacks layers that are all alike."""
    layers = (model.dims["layers"],) if rule.per_layer and model.is_uniform else ()
    return (*layers, model.expert_count) if rule.per_expert else layers


def padded(dims: Dims, tensor: int) -> Dims:
    return {**dims, "padded_vocab": padded_vocab_size(dims["vocab"], tensor)}


def chunks(model: Model, layout: Layout) -> Iterator[TensorChunk]:
    """Every chunk of the model's checkpoint for a layout, in file order: what each rank will ask for is one chunk."""
    dims = padded(model.dims, layout.tensor)
    stage_of = [s for s, count in enumerate(stage_layers(dims["layers"], layout.pipeline)) for _ in range(count)]
    per_rank = max(1, model.expert_count // layout.expert)
    for rule, layer, expert in model.numbered():
        before, apart = leading(rule, model), None if model.is_uniform else layer
        at = tuple(number for number in (layer if apart is None else None, expert) if number is not None)
        outside = 0 if rule.place is Place.EMBEDDING else layout.pipeline - 1
        stage = outside if layer is None else stage_of[layer]
        rank = -1 if expert is None else expert // per_rank
        name, also = global_name(rule, apart), aliases(rule, apart)
        shape, tp = shard_shape(rule, dims, 1), layout.tensor_of(rule)
        for tp_rank in range(tp if rule.is_cut else 1):
            slices = shard_slices(rule, dims, tp_rank, tp)
            if rule.sections:
                for section, cut in zip(section_names(rule, name), slices, strict=True):
                    yield TensorChunk(
                        section,
                        (),
                        (*before, cut.length * tp, *shape[1:]),
                        (*at, tp_rank * cut.length, *(0 for _ in shape[1:])),
                        (*(1 for _ in before), cut.length, *shape[1:]),
                        rule,
                        (cut,),
                        stage,
                        rank,
                    )
                continue
            if rule.sharding is Sharding.GATED:  # gate rows and up rows of a rank lie apart in the global tensor
                ranges: list[tuple[int, int, tuple[Slice, ...]]] = [
                    (p.tensor * (shape[0] // 2) + p.start, p.length, (p,)) for p in slices
                ]
            else:
                length = shard_shape(rule, dims, tp)[rule.dim]
                ranges = [(tp_rank * length if rule.is_cut else 0, length, tuple(slices))]
            for first, length, own in ranges:
                start, size = [0] * len(shape), list(shape)
                start[rule.dim], size[rule.dim] = first, length
                yield TensorChunk(
                    name, also, (*before, *shape), (*at, *start), (*(1 for _ in before), *size), rule, own, stage, rank
                )


def state_names(model: Model) -> Iterator[str]:
    """Names of the extra states that a Megatron model of either layer spec asks for when it loads; all are empty here.

    Transformer Engine's modules have one each: linear layers, norms and attention, but no embedding and no router.
    """
    modules: dict[str, tuple[int, ...]] = {}  # and the leading dimensions of their parameters
    for rule in model.parameters:
        is_router = rule.buffer or (rule.sharding is Sharding.REPLICATED and len(rule.hf[0].shape) == 2)
        if rule.place is Place.EMBEDDING or is_router:
            continue
        stacked = model.is_uniform or not rule.per_layer
        for layer in (None,) if stacked else rule.layers_of(model.dims["layers"]):
            module = (*aliases(rule, layer), global_name(rule, layer))[0].rpartition(".")[0]
            modules[module] = leading(rule, model)
    for layer in (None,) if model.is_uniform else range(model.dims["layers"]):
        names = (_stacked("decoder.layers.{layer}." + name, layer) for name in model.attention.unweighted)
        modules |= dict.fromkeys(names, (model.dims["layers"],) if layer is None else ())
    for module, counts in modules.items():
        for place in itertools.product(*map(range, counts or (1,))):
            yield f"{module}._extra_state/shard_{'.'.join(map(str, place))}_{'.'.join(map(str, counts or (1,)))}"
