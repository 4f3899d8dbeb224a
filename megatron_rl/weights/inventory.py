"""Matching a Megatron module's parameters and buffers with a family's rules, by global numbers: no parameter is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor, nn

from megatron_rl.models.family import Family, Model
from megatron_rl.models.lora import is_adapter
from megatron_rl.models.rules import Place, Rule
from megatron_rl.seams.megatron import Chunk
from megatron_rl.weights.parallel import Axis, ParallelGroups

Key = tuple[int, int, int]  # index of the rule in its family, global layer (-1: none), local expert (-1: none)


@dataclass(frozen=True)
class LocalWeight:
    """A parameter or mapped buffer of this process, with the rule that describes it (global numbers in its names)."""

    key: Key
    rule: Rule
    name: str
    parameter: Tensor


def split_axis(rule: Rule, parallel: ParallelGroups) -> Axis:
    """The axis along which a rule's parameter is cut."""
    return parallel.expert_tp if rule.per_expert else parallel.tp


def local_experts(model: Model, parallel: ParallelGroups) -> int:
    experts, ranks = model.expert_count, parallel.ep.size
    if experts % ranks:
        raise ValueError(f"num_experts = {experts} does not divide over {ranks} expert-parallel ranks")
    return experts // ranks


def unwrap(module: nn.Module) -> Chunk:
    """The GPTModel inside Megatron's wrappers (DistributedDataParallel, Float16Module)."""
    while isinstance(inner := getattr(module, "module", None), nn.Module):
        module = inner
    return cast(Chunk, module)


def local_weights(chunks: Sequence[nn.Module], model: Model, parallel: ParallelGroups) -> list[LocalWeight]:
    """The parameters of this process's model chunks and the buffers that rules name, of a family or of its adapters.

    Raises:
        ValueError: a parameter that the family's map does not know, or a weight of the family that the module lacks.
    """
    by_key: dict[Key, LocalWeight] = {}
    family, experts = model.family, local_experts(model, parallel)
    for chunk in map(unwrap, chunks):
        layers = {i: layer.layer_number - 1 for i, layer in enumerate(chunk.decoder.layers)}
        buffers = (pair for pair in chunk.named_buffers() if _match(pair[0], family, layers, buffers=True))
        for name, parameter in (*chunk.named_parameters(), *buffers):
            if is_adapter(name) != family.adapters:
                continue
            matched = _match(name, family, layers, buffers=not isinstance(parameter, nn.Parameter))
            if matched is None:
                raise ValueError(
                    f"parameter {name} of the Megatron model is not in the weight map of family `{family.name}`"
                )
            key, rule = matched
            if (
                rule.is_output and model.description.tied
            ):  # the last stage's copy of the embedding: loaded, never exported
                rule = replace(rule, hf=family.embedding.hf)
            if key in by_key:
                raise ValueError(f"parameters {by_key[key].name} and {name} both stand for {rule.hf[0].name}")
            _, layer, expert = key
            named = rule.at(layer, parallel.ep.rank * experts + expert)
            by_key[key] = LocalWeight(key, named, name, parameter)
        for key, rule in _expected(chunk, model, sorted(layers.values()), experts):
            if key not in by_key:
                hf_name = rule.at(key[1], parallel.ep.rank * experts + key[2]).hf[0].name
                raise ValueError(
                    f"the Megatron model has no parameter for {hf_name} (looked for {' or '.join(rule.megatron)}): "
                    f"it was not built from family `{family.name}`'s config mapping"
                )
    return list(by_key.values())


def _match(name: str, family: Family, layers: Mapping[int, int], buffers: bool) -> tuple[Key, Rule] | None:
    """The rule of a parameter (or buffer) of this name. Where layers differ, rules of several layers may share a name."""
    for index, rule in enumerate(family.rules):
        for pattern in rule.patterns if rule.buffer == buffers else ():
            if match := pattern.fullmatch(name):
                numbers = {group: int(value) for group, value in match.groupdict().items()}
                layer = layers[numbers["layer"]] if "layer" in numbers else -1
                if layer < 0 or rule.is_in(layer):
                    return (index, layer, numbers.get("expert", -1)), rule
    return None


def _expected(chunk: Chunk, model: Model, layers: Sequence[int], experts: int) -> Iterator[tuple[Key, Rule]]:
    for index, rule in enumerate(model.family.rules):
        if rule.per_layer:
            for layer in filter(rule.is_in, layers):
                for expert in range(experts) if rule.per_expert else [-1]:
                    yield (index, layer, expert), rule
        elif rule.is_output and model.description.tied:
            continue
        elif chunk.pre_process if rule.place is Place.EMBEDDING else chunk.post_process:
            yield (index, -1, -1), rule
