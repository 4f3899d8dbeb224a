"""Transformer Engine: what is private of it. Written for 2.20.2."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

# Of an FP8 parameter: its values before they were rounded, in host memory. Megatron-Core's distributed optimizer takes its
# fp32 masters from them by this getter, once, and clears them; the getter stays.
EXACT, GET_EXACT = "_high_precision_init_val", "get_high_precision_init_val"
UNFUSED = "unfused"
GET_PARTS, SET_PARTS = "prepare_for_saving", "restore_from_saved"  # of an FP8 tensor


def keep_exact(parameter: Tensor, values: Tensor) -> None:
    """Makes an optimizer built later begin with `values`, of which an FP8 parameter holds the rounded ones."""
    if hasattr(parameter, GET_EXACT):
        setattr(parameter, EXACT, values.cpu())


def keep_rounded(parameters: Iterable[Tensor]) -> None:
    """Makes another optimizer begin with what FP8 parameters hold, where an earlier one has cleared their exact values."""
    for parameter in parameters:
        if hasattr(parameter, GET_EXACT) and not hasattr(parameter, EXACT):
            setattr(parameter, EXACT, parameter.detach().dequantize().cpu())


def parts(parameter: Tensor) -> list[Tensor | None]:
    """Tensors that an FP8 parameter is made of: data and scales, some of them perhaps not there; of another, itself."""
    if not hasattr(parameter, GET_PARTS):
        return [parameter.data]
    found = getattr(parameter, GET_PARTS)()[0]  # they are taken out
    getattr(parameter, SET_PARTS)(found)
    return found


def host_copy(parameter: Tensor) -> Tensor:
    """The values of a parameter in host memory; those of one in FP8 in its plain dtype.

    A copy of an FP8 tensor would be one too, and is copied back only where both have data in the same directions by then.
    """
    parameter = parameter.detach()
    plain = parameter.dequantize() if hasattr(parameter, GET_PARTS) else parameter
    return plain.to("cpu", copy=True)


def holding(parameter: Tensor) -> Callable[[], None]:
    """Copies a parameter; what is returned gives it these values back, bit for bit.

    A clone of an FP8 tensor shares its scales, which other values that are quantised into the tensor overwrite.
    """
    originals = parts(parameter)
    copies = [original if original is None else original.clone() for original in originals]

    @torch.no_grad()
    def restore() -> None:
        for original, copy in zip(originals, copies, strict=True):
            if original is not None and copy is not None:
                original.copy_(copy)
        if hasattr(parameter, SET_PARTS):
            getattr(parameter, SET_PARTS)(originals)

    return restore


def attention_kernels() -> str:
    """The kind of kernels that the last attention of this process took: flash, fused (cuDNN's) or `UNFUSED`."""
    backends = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention")._attention_backends
    return next((kind for kind in ("flash", "fused") if backends[f"use_{kind}_attention"]), UNFUSED)
