"""The kind of this machine's GPUs, from NVML: asking it starts no CUDA, which would not work in forks of the process."""

from __future__ import annotations

import functools

FP32_SCALES = (
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"  # variable: of `actor.fp8.recipe=blockwise`, fp32 and not powers of two
)


@functools.cache
def capability() -> tuple[int, int]:
    """CUDA compute capability of the first GPU, (9, 0) for Hopper's; those of a machine are of one kind."""
    import pynvml  # of GPU machines only

    pynvml.nvmlInit()
    try:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(0))
    finally:
        pynvml.nvmlShutdown()
    return major, minor
