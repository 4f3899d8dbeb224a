"""The device, and the few things that differ between a GPU and a CPU."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator

import torch

from megatron_rl.runtime import nvml

_without_content = False  # inside `without_content`
_plain = False  # inside `plain_layers`


def has_gpu() -> bool:
    return not _without_content and torch.cuda.is_available()


def is_hopper() -> bool:
    """Whether this machine's GPUs are of compute capability 9.x, which multiply blockwise FP8 with scales in fp32. Later ones
    take powers of two. Does not start CUDA, which then would not work in forks of this process."""
    return has_gpu() and nvml.capability()[0] == 9


def has_transformer_engine() -> bool:
    return has_gpu() and not _plain and importlib.util.find_spec("transformer_engine") is not None


@contextlib.contextmanager
def plain_layers() -> Iterator[None]:
    """While entered, models are built of the plain layers, which is what Transformer Engine's are compared with."""
    global _plain
    _plain = True
    try:
        yield
    finally:
        _plain = False


@contextlib.contextmanager
def without_content() -> Iterator[None]:
    """While entered, models and their state are tensors of torch's meta device, which have shapes and no content."""
    from megatron_rl.seams.megatron_cpu import MegatronOnCpu

    global _without_content
    _without_content, MegatronOnCpu.current_device = True, torch.device("meta")
    try:
        yield
    finally:
        _without_content, MegatronOnCpu.current_device = False, torch.device("cpu")


def index() -> int:
    """This process's GPU among those that it sees. CUDA's own "current device" is one per thread, and 0 in a new one."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))) % torch.cuda.device_count()


def device() -> torch.device:
    """This process's device: its own GPU, or the CPU."""
    if _without_content:
        return torch.device("meta")
    return torch.device("cuda", index()) if has_gpu() else torch.device("cpu")


def backend() -> str:
    """The `torch.distributed` backend for tensors that live on `device()`."""
    return "nccl" if has_gpu() else "gloo"


def megatron() -> contextlib.AbstractContextManager[object]:
    """Enter around every call into Megatron-Core: nothing on a GPU, the CPU adapter elsewhere."""
    if has_gpu():
        return contextlib.nullcontext()
    from megatron_rl.seams.megatron_cpu import MegatronOnCpu

    return MegatronOnCpu()


def synchronize() -> None:
    if has_gpu():
        torch.cuda.synchronize()


def empty_cache() -> None:
    """GPU: gives what torch keeps for later use back to the device, where vLLM maps its memory."""
    if has_gpu():
        torch.cuda.empty_cache()


def host_buffer(size: int) -> torch.Tensor:
    """Bytes of host memory, uint8, not filled; pinned where there is a GPU, so that copies run without waiting."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=has_gpu())
