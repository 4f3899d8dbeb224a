"""`make check-gpu-set` as far as it runs without the 10 GB: the stand-ins, the recipes, the verdicts, what it breaks."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("gpu_set_main", ROOT / "tools" / "gpu_set" / "__main__.py")
assert spec is not None
assert spec.loader is not None
gpu_set = importlib.util.module_from_spec(spec)
sys.modules["gpu_set_main"] = gpu_set  # its dataclass looks itself up
spec.loader.exec_module(gpu_set)


@pytest.fixture
def bench(tmp_path: Path) -> object:
    return gpu_set.Bench(tmp_path, sys.executable, tmp_path / "no-toolkit")


def test_the_stand_ins_answer(bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_set.Bench, "own", Path(sys.executable))
    with pytest.raises(gpu_set.Failed, match="pynvml"):  # compiled; the GPU set's own package is not here
        gpu_set.stand_ins(bench)
    cuda, nvml = (ctypes.CDLL(str(tmp_path / "stand-ins" / name / name)) for name in gpu_set.STAND_INS)
    count, name = ctypes.c_int(-1), ctypes.create_string_buffer(64)
    assert (cuda.cuInit(0), cuda.cuDeviceGetCount(ctypes.byref(count)), count.value) == (100, 100, 0)
    function = ctypes.c_void_p()
    assert cuda.cuGetProcAddress_v2(b"cuNoSuchFunction", ctypes.byref(function), 13000, 0, None) == 1
    device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    assert nvml.nvmlDeviceGetHandleByIndex_v2(8, ctypes.byref(device)) == 2, "eight cards, from 0"
    assert nvml.nvmlDeviceGetHandleByIndex_v2(7, ctypes.byref(device)) == 0
    assert nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)) == 0
    assert (major.value, minor.value) == (9, 0)
    assert nvml.nvmlDeviceGetName(device, name, 64) == 0
    assert name.value == b"NVIDIA H100 80GB HBM3"


def test_a_missing_compiler_is_a_verdict(bench, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("CUDA_HOME", str(bench.cuda))
    assert gpu_set.check(bench, ["toolkit", "packages"]) == "toolkit", "nothing follows a step that fails"
    assert "no-toolkit/bin/nvcc: set CUDA_HOME" in capsys.readouterr().out
    [(name, verdict, _, _)] = bench.rows
    assert (name, verdict) == ("toolkit", "FAILED")
    assert "| `toolkit` | nvcc of CUDA 13" in gpu_set.page(bench)


def test_a_home_that_is_missing_reaches_the_steps(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/tmp")
    bench.broken = "cache"
    assert bench.environment()["HOME"] == "/dev/null/home"
    assert "VLLM_CACHE_ROOT" not in bench.environment()


def test_every_break_names_steps_and_the_one_that_notices() -> None:
    assert set(gpu_set.BREAKS) == {"pins", "nvcc", "cache", "option"}
    for steps, notices in gpu_set.BREAKS.values():
        assert steps[-1] == notices
        assert set(steps) <= gpu_set.STEPS.keys()


def test_what_is_planned_and_self_tested_exists() -> None:
    from megatron_rl.selftest.steps import STEPS

    assert all((ROOT / "recipes" / f"{name}.yaml").is_file() for name in gpu_set.PLANNED)
    assert {step.name for step in STEPS if not step.need} >= set(gpu_set.SELF_TEST)
