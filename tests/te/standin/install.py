"""Puts the stand-ins in place: after `install`, Megatron-Core finds Transformer Engine, which computes on this CPU."""

from __future__ import annotations

import functools
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.te.standin import attention, capability, enums, gemm, norm, optimizer, quantize, rope
from tests.te.standin.moe import permutation, router, rows

FOLDER = Path(os.environ.get("TE_PYTHON") or Path(__file__).parents[3] / ".te")  # of `make newest`, of `make te-setup`
_COMPILED = "transformer_engine_torch"
# Files of Transformer Engine's Python that are nothing but calls of Triton or of ONNX.
_TRITON, _ONNX = "transformer_engine.pytorch.triton", "transformer_engine.pytorch.onnx_extensions"
_HOPPER = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="a stand-in for an H100")
_CUDA = {  # what `torch.cuda` answers
    "get_device_properties": _HOPPER,
    "get_device_capability": (_HOPPER.major, _HOPPER.minor),
    "is_current_stream_capturing": False,
}


def install() -> None:
    """Call it before Megatron-Core is imported, in a process that does nothing else: nothing is put back."""
    if not (FOLDER / "transformer_engine").is_dir():
        raise RuntimeError(f"{FOLDER} does not hold Transformer Engine's Python; run `make te-setup`")
    os.environ |= {"NVTE_PROJECT_BUILDING": "1", "NVTE_FRAMEWORK": "none", "TORCH_COMPILE_DISABLE": "1"}
    sys.path.append(str(FOLDER))
    compiled = _module(_COMPILED, attention, capability, enums, gemm, norm, optimizer, quantize, rope, router, rows)
    vars(compiled)["__getattr__"] = _missing
    _module(f"{_TRITON}.permutation", permutation)
    _module(_TRITON)
    for name in (*(f"{_TRITON}.{file}" for file in ("cross_entropy", "pad", "grouped_dbias_dscales", "mhc")), _ONNX):
        vars(_module(name))["__getattr__"] = _missing
    for name, answer in _CUDA.items():
        setattr(torch.cuda, name, functools.partial(_always, answer))
    torch.version.cuda = "13.0"
    torch.distributed.batch_isend_irecv = _waited_for_once(torch.distributed.batch_isend_irecv)
    import transformer_engine.common as common

    common.load_framework_extension = lambda framework: None
    from transformer_engine.pytorch import distributed
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    # Of layers that are computed again.
    distributed._get_cuda_rng_state = functools.partial(_always, None)
    distributed._set_cuda_rng_state = _always
    TransformerEngineBaseModule.__init__ = _as_on_a_gpu(TransformerEngineBaseModule.__init__)
    _use_in_the_project()


def _module(name: str, *parts: ModuleType) -> ModuleType:
    """A module of this name, of what these define."""
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    for part in parts:
        own = {key: value for key, value in vars(part).items() if getattr(value, "__module__", "") == part.__name__}
        vars(module).update(own)
    sys.modules[name] = module
    return module


def _missing(name: str) -> Callable[..., None]:
    """For an operator that Transformer Engine's Python names and that has no stand-in: it fails where it is called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def call(*_: object, **__: object) -> None:
        raise NotImplementedError(f"Transformer Engine's operator {name} has no stand-in on a CPU")

    return call


def _always(answer: object, *_: object, **__: object) -> object:
    return answer


def _waited_for_once(exchange: Callable[..., Any]) -> Callable[..., list[SimpleNamespace]]:
    """Requests that may be waited for again, as those of NCCL: gloo would then wait for another message."""

    def call(operations: Sequence[object]) -> list[SimpleNamespace]:
        return [SimpleNamespace(wait=functools.cache(request.wait)) for request in exchange(operations)]

    return call


def _as_on_a_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called while CUDA is said to be there: it asserts it, and does nothing else with it."""

    @functools.wraps(function)
    def call(*arguments: object, **options: object) -> object:
        available = torch.cuda.is_available
        torch.cuda.is_available = lambda: True
        try:
            return function(*arguments, **options)
        finally:
            torch.cuda.is_available = available

    return call


def _use_in_the_project() -> None:
    from megatron_rl.runtime import device

    is_cuda = torch.Tensor.is_cuda.__get__

    def answer(tensor: torch.Tensor) -> bool:
        """Tensors say to Transformer Engine's Python, and to nothing else, that they are CUDA's: it asserts that."""
        asked_by = str(sys._getframe(1).f_globals["__name__"])
        return asked_by.startswith("transformer_engine") or bool(is_cuda(tensor))

    torch.Tensor.is_cuda = property(answer)  # type: ignore[assignment,misc]
    # Otherwise a mode is left during the backward pass, where Transformer Engine names CUDA too.
    torch.autograd.has_torch_function = lambda arguments: False  # type: ignore[attr-defined]
    device.has_transformer_engine = lambda: not device._plain
