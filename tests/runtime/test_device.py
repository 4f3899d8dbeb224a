"""What is decided by the kind of the GPU, in a process that has not started CUDA."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.config import Config, Machine
from megatron_rl.config.actor import FP8Config
from megatron_rl.launch.ranks import fp8_scales
from megatron_rl.runtime import device, nvml


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A stand-in for NVML, of a machine with GPUs; CUDA must not be started, as in the process that forks ranks."""
    library = SimpleNamespace(
        capability=(9, 0),
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetCudaComputeCapability=lambda handle: library.capability,
    )

    def start() -> None:
        raise AssertionError("CUDA was started")

    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", start)
    monkeypatch.delenv(nvml.FP32_SCALES, raising=False)
    nvml.capability.cache_clear()
    yield library
    nvml.capability.cache_clear()


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (8, 0)])
def test_the_launcher_asks_for_fp32_scales_on_hopper(
    library: SimpleNamespace, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    library.capability = capability
    assert device.is_hopper() is (capability[0] == 9)
    config, gpus = Config(run_dir=""), Machine(gpus=8)
    assert fp8_scales(config, gpus) == {}, "no FP8"
    config.actor.fp8 = FP8Config(recipe="blockwise")
    assert fp8_scales(config, gpus) == ({nvml.FP32_SCALES: "1"} if capability[0] == 9 else {})
    assert fp8_scales(config, Machine(gpus=0)) == {}
    config.actor.fp8.param_gather = True
    assert fp8_scales(config, gpus) == {}, "what parameters in FP8 stand for is sent in bf16"
    config.actor.fp8.param_gather = False
    monkeypatch.setenv(nvml.FP32_SCALES, "0")
    assert fp8_scales(config, gpus) == {}, "the user's"
