"""Which of a model's weights are in block-wise FP8 (`base.block_fp8`), and how config.json says so. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from megatron_rl.base.block_fp8 import BLOCK, SCALE, dequantise, quantise
from megatron_rl.models.family import Family, Model, ModelDescription
from megatron_rl.models.hf_config import JSON

if TYPE_CHECKING:
    from torch import Tensor


def stored(
    weights: Iterable[tuple[str, Tensor]], modules: Collection[str], *, rounded: bool
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) pairs with the weights of `modules` quantised: values and scales, each under its name, or
    with `rounded` the numbers that these stand for, in the weight's own dtype."""
    for name, weight in weights:
        if not (name.endswith(".weight") and module_of(name) in modules):
            yield name, weight
            continue
        values, scales = quantise(weight)
        if rounded:
            yield name, dequantise(values, scales).to(weight.dtype)
        else:
            yield name, values
            yield name + SCALE, scales


# -------------------------------------------------------------------------------------------------------- which weights
def module_of(name: str) -> str:
    """The module that a tensor is quantised or kept with: a layer's experts are one."""
    before, experts, _ = name.partition(".experts.")
    return f"{before}.experts" if experts else name.rpartition(".")[0]


def quantised_modules(model: Model, skip: Sequence[str] = ()) -> frozenset[str]:
    """Modules whose weights are in FP8: matrices of attention, feed-forwards and experts, but for what `skip` names.
    `skip`: patterns (`*` for any characters) of whole module names, such as `model.layers.0.*`.

    Raises:
        ValueError: a pattern matches no such module, or only some of those that engines keep in one matrix, or none is left.
    """
    unused, chosen = set(skip), set[str]()
    for rule in (rule for rule in model.parameters if rule.is_projection):
        for layer in rule.layers_of(model.dims["layers"]):
            names = [module_of(tensor.name) for tensor in rule.at(layer, 0).hf]
            matching = [{pattern for pattern in skip if fnmatchcase(name, pattern)} for name in names]
            unused -= set().union(*matching)
            if not any(matching):
                chosen.update(names)
            elif not all(matching):
                raise ValueError(
                    f"names {names[[bool(found) for found in matching].index(True)]} alone, and engines keep "
                    f"{', '.join(name.rpartition('.')[2] for name in names)} in one matrix: name all of them or none"
                )
    if unused:
        raise ValueError(f"has {sorted(unused)[0]!r}, which matches no matrix that would be in FP8: remove it")
    if not chosen:
        raise ValueError("leaves no matrix in FP8: name fewer")
    return frozenset(chosen)


def vllm_parameters(model: Model, modules: Collection[str]) -> frozenset[str]:
    """vLLM's names of the parameters that hold the weights of `modules`; without those that their rules do not name."""
    rules = [rule for rule in model.parameters if rule.is_projection and rule.engine]
    return frozenset(
        name.format(layer=layer)
        for rule in rules
        for layer in rule.layers_of(model.dims["layers"])
        for name, tensor in zip(rule.engine, rule.at(layer, 0).hf, strict=True)
        if module_of(tensor.name) in modules
    )


def quantization_config(
    family: Family, description: ModelDescription, modules: frozenset[str] | None = None
) -> dict[str, JSON]:
    """The entry of config.json that transformers and vLLM read. `modules`: those in FP8; None: all that can be."""
    excluded = {family.output.hf[0].name.removesuffix(".weight"): None}  # in order
    for rule in (
        rule for rule in Model(family, description).parameters if rule.per_layer and len(rule.hf[0].shape) == 2
    ):
        for layer in rule.layers_of(description.dims["layers"]):
            names = {module_of(tensor.name): None for tensor in rule.at(layer, 0).hf}
            if not rule.is_projection or (modules is not None and modules.isdisjoint(names)):
                excluded |= names
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [*excluded],
    }
