"""Faults that the types must see: a gradient that tensor-parallel ranks have shares of, and nobody sums any more."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

from megatron.core import tensor_parallel
from torch import Tensor

from megatron_rl.actor import actor, build
from megatron_rl.modules import deepstack
from megatron_rl.seams.megatron_gated_delta import GatedDeltaLayer

_FINALIZE = importlib.import_module("megatron.core.distributed.finalize_model_grads")  # a function has its name

_GATHER = tensor_parallel.gather_from_sequence_parallel_region


def _as_it_is(value: Tensor, *_: object, **__: object) -> Tensor:
    return value


def _marked(ending: str, mark: bool) -> contextlib.AbstractContextManager[object]:
    """Sets the mark by which gradients are summed over tensor-parallel ranks, of parameters whose names end so."""
    make = build.build_model

    def built(*arguments: Any) -> list[Any]:
        chunks = make(*arguments)
        found = [p for chunk in chunks for name, p in chunk.named_parameters() if name.endswith(ending)]
        assert found
        for parameter in found:
            parameter.sequence_parallel = mark
        return chunks

    return mock.patch.object(build, "build_model", built)


FAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "": contextlib.nullcontext,
    # Norms' and biases', with sequence parallelism; those of norms of heads also without.
    "norms": lambda: mock.patch.object(_FINALIZE, "_allreduce_non_tensor_model_parallel_grads"),
    # Megatron-LM #7452, finding 11: of the norm behind a gated-delta layer, without sequence parallelism.
    "gated norm": lambda: mock.patch.object(GatedDeltaLayer, "_summed", lambda self, gradient: gradient),
    # Of the hidden states that the head takes: each rank's rows of the vocabulary give a share.
    "head": lambda: mock.patch.object(actor, "copy_to_region", _as_it_is),
    # Of keys and values: each context-parallel rank drops the gradients from the other ranks' queries.
    "keys": lambda: mock.patch.object(
        tensor_parallel, _GATHER.__name__, partial(_GATHER, tensor_parallel_output_grad=False)
    ),
    # Each rank routes its own tokens with its own copy of the router.
    "router": lambda: _marked("mlp.router.weight", False),
    # Each rank multiplies its own tokens with its own copy of the matrix.
    "latents": lambda: _marked("linear_kv_down_proj.weight", False),
    # Of a vision tower's outputs that layers add: each rank adds those of its own tokens.
    "features": lambda: mock.patch.object(deepstack, "copy_to_tensor_model_parallel_region", _as_it_is),
    # Summed over tensor-parallel ranks too, as Megatron-Core marks them.
    "expert biases": lambda: _marked("linear_fc2.bias", True),
}
