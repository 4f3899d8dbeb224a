"""Block-wise FP8 as DeepSeek and Qwen publish it: e4m3 weights, one fp32 scale per 128 x 128 block.

`weight_scale_inv` is what a stored value is multiplied by: the block's largest magnitude / 448. Importing it loads no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from megatron_rl.models.family import Family, Model, ModelDescription
from megatron_rl.models.hf_config import JSON

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 128
DTYPE = "F8_E4M3"
LARGEST = 448.0  # that e4m3 holds
SCALE = "_scale_inv"  # appended to the weight's name
_MOST = 2**24  # numbers that exist in fp32 at once


def scales_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    return -(-shape[0] // BLOCK), -(-shape[1] // BLOCK)


# -------------------------------------------------------------------------------------------------------------- values
def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] of any float dtype -> e4m3 of the same shape, and fp32 scales of the blocks, on its device. Or
    [experts, rows, columns], each expert on its own; rows are then a multiple of a block.

    A block with a value that is not finite has a scale that is not; the device is not waited for.
    """
    import torch

    if weight.dim() == 3:
        values, scales = quantise(weight.flatten(0, 1))
        return values.view(weight.shape), scales.view(len(weight), -1, scales.shape[1])
    rows, columns = weight.shape
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(scales_shape((rows, columns)), dtype=torch.float32, device=weight.device)
    width = scales.shape[1] * BLOCK
    step = max(1, _MOST // (width * BLOCK))  # rows of blocks at a time: fp32 copies stay small
    for index in range(0, scales.shape[0], step):
        part = weight[index * BLOCK : (index + step) * BLOCK]
        padded = part.new_zeros(-(-len(part) // BLOCK) * BLOCK, width, dtype=torch.float32)
        padded[: len(part), :columns] = part
        blocks = padded.view(-1, BLOCK, scales.shape[1], BLOCK)
        scale = blocks.abs().amax(dim=(1, 3)) / LARGEST
        scale = scale.masked_fill(scale == 0, 1.0)
        scaled = (blocks / scale[:, None, :, None]).clamp(-LARGEST, LARGEST).view(-1, width)
        values[index * BLOCK : (index + step) * BLOCK] = scaled[: len(part), :columns].to(torch.float8_e4m3fn)
        scales[index : index + step] = scale
    return values, scales


def dequantise(values: Tensor, scales: Tensor) -> Tensor:
    """What `quantise` made, as fp32 numbers."""
    rows, columns = values.shape[-2:]
    each = scales.repeat_interleave(BLOCK, -2)[..., :rows, :].repeat_interleave(BLOCK, -1)[..., :columns]
    return values.float() * each


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
        for layer in range(model.dims["layers"]):
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
    layers = range(model.dims["layers"])
    rules = [rule for rule in model.parameters if rule.is_projection and rule.engine]
    return frozenset(
        rule.engine.format(layer=layer)
        for rule in rules
        for layer in layers
        if module_of(rule.at(layer, 0).hf[0].name) in modules
    )


def quantization_config(
    family: Family, description: ModelDescription, modules: frozenset[str] | None = None
) -> dict[str, JSON]:
    """The entry of config.json that transformers and vLLM read. `modules`: those in FP8; None: all that can be."""
    kept = {family.output.hf[0].name.removesuffix(".weight"): None}  # in order
    for rule in (
        rule for rule in Model(family, description).parameters if rule.per_layer and len(rule.hf[0].shape) == 2
    ):
        for layer in range(description.dims["layers"]):
            names = {module_of(tensor.name): None for tensor in rule.at(layer, 0).hf}
            if not rule.is_projection or (modules is not None and modules.isdisjoint(names)):
                kept |= names
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [*kept],
    }
