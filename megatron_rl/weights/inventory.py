"""Matching a Megatron module's parameters with a family's rules: every parameter accounted for, by global number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import nn

from megatron_rl.models.family import Family, Model
from megatron_rl.models.lora import is_adapter
from megatron_rl.models.rules import Place, Rule
from megatron_rl.seams.megatron import Chunk
from megatron_rl.weights.parallel import Axis, ParallelGroups

Key = tuple[int, int, int]  # index of the rule in its family, global layer (-1: none), local expert (-1: none)


@dataclass(frozen=True)
class LocalWeight:
    """A parameter of this process, with the rule that describes it (global numbers filled into the names)."""

    key: Key
    rule: Rule
    name: str
    parameter: nn.Parameter


def split_axis(rule: Rule, parallel: ParallelGroups) -> Axis:
    """The axis along which a rule's parameter is cut."""
    return parallel.expert_tp if rule.per_expert else parallel.tp


def local_experts(model: Model, parallel: ParallelGroups) -> int:
    experts, ranks = model.dims["experts"], parallel.ep.size
    if experts % ranks:
        raise ValueError(f"num_experts = {experts} does not divide over {ranks} expert-parallel ranks")
    return experts // ranks


def unwrap(module: nn.Module) -> Chunk:
    """The GPTModel inside Megatron's wrappers (DistributedDataParallel, Float16Module)."""
    while isinstance(inner := getattr(module, "module", None), nn.Module):
        module = inner
    return cast(Chunk, module)


def local_weights(chunks: Sequence[nn.Module], model: Model, parallel: ParallelGroups) -> list[LocalWeight]:
    """The parameters of this process's model chunks, of a family or of its adapters.

    Raises:
        ValueError: a parameter that the family's map does not know, or a weight of the family that the module lacks.
    """
    found: dict[Key, LocalWeight] = {}
    family, experts = model.family, local_experts(model, parallel)
    for chunk in map(unwrap, chunks):
        layers = {i: layer.layer_number - 1 for i, layer in enumerate(chunk.decoder.layers)}
        for name, parameter in chunk.named_parameters():
            if is_adapter(name) != family.adapters:
                continue
            key, rule = _match(name, family, layers)
            if (
                rule.is_output and model.description.tied
            ):  # the last stage's copy of the embedding: loaded, never exported
                rule = replace(rule, hf=family.embedding.hf)
            if key in found:
                raise ValueError(f"parameters {found[key].name} and {name} both stand for {rule.hf[0].name}")
            _, layer, expert = key
            named = rule.at(layer, parallel.ep.rank * experts + expert)
            found[key] = LocalWeight(key, named, name, parameter)
        for key, rule in _expected(chunk, model, sorted(layers.values()), experts):
            if key not in found:
                hf_name = rule.at(key[1], parallel.ep.rank * experts + key[2]).hf[0].name
                raise ValueError(
                    f"the Megatron model has no parameter for {hf_name} (looked for {' or '.join(rule.megatron)}): "
                    f"it was not built from family `{family.name}`'s config mapping"
                )
    return list(found.values())


def _match(name: str, family: Family, layers: Mapping[int, int]) -> tuple[Key, Rule]:
    for index, rule in enumerate(family.rules):
        for pattern in rule.patterns:
            match = pattern.fullmatch(name)
            if match:
                numbers = {group: int(value) for group, value in match.groupdict().items()}
                layer = layers[numbers["layer"]] if "layer" in numbers else -1
                return (index, layer, numbers.get("expert", -1)), rule
    raise ValueError(f"parameter {name} of the Megatron model is not in the weight map of family `{family.name}`")


def _expected(chunk: Chunk, model: Model, layers: Sequence[int], experts: int) -> Iterator[tuple[Key, Rule]]:
    for index, rule in enumerate(model.family.rules):
        if rule.per_layer:
            for layer in layers:
                for expert in range(experts) if rule.per_expert else [-1]:
                    yield (index, layer, expert), rule
        elif rule.is_output and model.description.tied:
            continue
        elif chunk.pre_process if rule.place is Place.EMBEDDING else chunk.post_process:
            yield (index, -1, -1), rule
