"""What the device is, and the few things that differ between a GPU and a CPU."""

from __future__ import annotations

import contextlib
import importlib.util
from typing import Any

import torch


def has_gpu() -> bool:
    return torch.cuda.is_available()


def has_transformer_engine() -> bool:
    return has_gpu() and importlib.util.find_spec("transformer_engine") is not None


def device() -> torch.device:
    """This process's device: its own GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu() else torch.device("cpu")


def backend() -> str:
    """The `torch.distributed` backend for tensors that live on `device()`."""
    return "nccl" if has_gpu() else "gloo"


def megatron() -> contextlib.AbstractContextManager[Any]:
    """Enter around every call into Megatron-Core: nothing on a GPU, the CPU adapter elsewhere."""
    if has_gpu():
        return contextlib.nullcontext()
    from megatron_rl.runtime.cpu_megatron import MegatronOnCpu

    return MegatronOnCpu()


def synchronize() -> None:
    if has_gpu():
        torch.cuda.synchronize()
