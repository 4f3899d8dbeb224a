"""torch's compiler where it is switched off (TORCH_COMPILE_DISABLE, as on CPUs). Written for torch 2.13 and vLLM 0.32.

`torch.compile` then returns what it is given, but imports the compiler first, inductor included. Megatron-Core calls it some
forty times as it is imported. vLLM imports a part of inductor to patch it, and goes without where that is missing. Both
together took 0.9 of a rank's 7.5 CPU seconds in a run of one step.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

import torch

PATCHED = "torch._inductor.lowering"  # by vllm.env_override, if it can be imported


def is_off() -> bool:
    """Whether it is off, as torch and vLLM read it."""
    return os.environ.get("TORCH_COMPILE_DISABLE") == "1"


def leave_out() -> None:
    """From here on `torch.compile` imports nothing, where it is switched off. Before Megatron-Core is imported."""
    if is_off():
        torch.compile = _unchanged  # type: ignore[assignment]


def _unchanged[T](model: T | None = None, **options: object) -> T | Callable[[T], T]:
    """Returns a function as it is, called with it or as a decorator with options."""
    return (lambda model: model) if model is None else model


@contextlib.contextmanager
def left_out_of_vllm() -> Iterator[None]:
    """Around vLLM's first import. Where the compiler is switched off, the module that vLLM would patch cannot be imported,
    and vLLM skips the patch."""
    if not is_off() or PATCHED in sys.modules:
        yield
        return
    sys.modules[PATCHED] = None  # type: ignore[assignment]  # makes an import of it fail
    try:
        yield
    finally:
        del sys.modules[PATCHED]
