"""What a node finds out about its GPUs, their driver, caches and compilers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_rl.config.schema import Config
from megatron_rl.preflight import gpus, local
from megatron_rl.preflight.across_ranks import _differences
from megatron_rl.preflight.verdict import FAILED, WARNING
from megatron_rl.runtime import compilers

NVIDIA_SMI = """\
0, GPU-aa01, 0, No, No, 120, 81559
1, GPU-bb02, 3, No, No, 0, 81559
2, GPU-cc03, [N/A], Yes, No, 0, 81559
3, GPU-dd04, 0, No, No, 60000, 81559
"""


def test_what_nvidia_smi_says_is_understood() -> None:
    found = list(gpus.gpu_problems(NVIDIA_SMI, memory_fraction=0.6))
    assert [text.split(":")[0].split(" has")[0].split(" could")[0] for _, text in found] == ["GPU 1", "GPU 2", "GPU 3"]
    assert "3 uncorrected memory errors" in found[0][1]
    assert "58.6 GiB of 79.6 GiB are in use by other processes" in found[2][1]
    ((level, text),) = gpus.gpu_problems("5, GPU-ee, 0, No, Yes, 0, 81559\n", memory_fraction=0.6)
    assert (level, "GPU 5" in text, "reset" in text) == (WARNING, True, True)


@pytest.mark.parametrize(("visible", "seen"), [("0, 3", "3"), ("GPU-cc,0", "2"), ("0", ""), ("", ""), ("MIG-bb02", "")])
def test_only_the_jobs_own_gpus_count(visible: str, seen: str) -> None:
    found = gpus.gpu_problems(NVIDIA_SMI, 0.6, visible)
    assert "".join(text.removeprefix("GPU ")[0] for _, text in found) == seen


def test_a_driver_that_hangs_does_not_hang_the_check(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, script in {"nvidia-smi": "exec sleep 60", "dmesg": "exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(gpus, "_ANSWER", 0.5)
    [(level, text)] = gpus.check_gpus(config)
    assert (level, "nvidia-smi has not answered" in text) == (FAILED, True)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho Unable to determine the device handle\nexit 255\n")
    monkeypatch.setattr(gpus, "_ANSWER", 10.0)
    assert list(gpus.check_gpus(config)) == [(FAILED, "nvidia-smi fails: Unable to determine the device handle")]
    (tmp_path / "nvidia-smi").write_text('#!/bin/sh\ncase "$*" in *driver_version*) echo 535.183.01 ;; esac\n')
    assert [text[:35] for _, text in gpus.check_gpus(config)] == ["the NVIDIA driver is 535.183.01, an"]


def test_a_process_must_see_all_gpus_of_its_node(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert list(gpus.check_devices(config)) == []
    monkeypatch.setattr(gpus, "count_gpus", lambda: 8)
    [(level, text)] = gpus.check_devices(config)
    assert (level, "can use none of the 8 GPUs here: it is a build for CPUs" in text) == (FAILED, True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    [(level, text)] = gpus.check_devices(config)
    assert (level, "sees 1 of the GPUs of its node, on which 8 processes run" in text) == (FAILED, True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert list(gpus.check_devices(config)) == []
    assert local.PER_RANK["devices"] is gpus.check_devices


def test_a_cache_that_cannot_be_written_is_named(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container without its user's home."""
    assert list(gpus.check_caches(config)) == [], "without GPUs nothing is compiled"
    monkeypatch.setattr(gpus, "count_gpus", lambda: 8)
    for name in compilers.CACHES:
        monkeypatch.setenv(name, str(tmp_path / name))
    assert list(gpus.check_caches(config)) == []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "file" / "below"))
    [(level, text)] = gpus.check_caches(config)
    assert (level, "FLASHINFER_WORKSPACE_BASE" in text, "MEGATRON_RL_CACHE" in text) == (FAILED, True, True)
    assert local.PER_NODE["caches"] is gpus.check_caches


def test_fp8_rollouts_need_a_compiler_on_every_node(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert list(gpus.check_compilers(config)) == []
    assert gpus.compiler_facts(config) == {}
    monkeypatch.setattr(gpus, "count_gpus", lambda: 8)
    assert gpus.compiler_facts(config) == {"nvcc": "missing", "ninja": "missing"}
    assert list(gpus.check_compilers(config)) == [], "without FlashInfer nothing is lost"
    config.rollout.fp8 = "blockwise"
    [(level, text)] = gpus.check_compilers(config)
    assert (level, "no nvcc and no ninja here" in text, "site_setup" in text) == (FAILED, True, True)
    (tmp_path / "bin").mkdir()
    for name in ("nvcc", "ninja"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\necho Cuda compilation tools, release 12.8, V12.8.93\n")
        (tmp_path / "bin" / name).chmod(0o755)
    [(level, text)] = gpus.check_compilers(config)
    assert (level, "nvcc is of CUDA 12.8" in text, "12.9 or newer" in text) == (FAILED, True, True)
    (tmp_path / "bin" / "nvcc").write_text("#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.88\n")
    assert list(gpus.check_compilers(config)) == []
    good, bad = gpus.compiler_facts(config), {"nvcc": "there", "ninja": "missing"}
    [finding] = _differences([(node, {"compilers": bad if node == "n2" else good}) for node in ("n1", "n2", "n3")])
    assert (finding.check, finding.level, finding.node) == ("compilers", FAILED, "n2")
    assert local.PER_NODE["compilers"] is gpus.check_compilers


def test_an_old_driver_is_named_with_the_minimum() -> None:
    assert list(gpus.driver_problems("580.65.06\n580.65.06\n")) == []
    [(level, text)] = gpus.driver_problems("535.183.01\n535.183.01\n")
    assert (level, "is 535.183.01, and CUDA 13 needs 580 or newer" in text) == (FAILED, True)


def test_xid_errors_are_read_from_the_kernel_log() -> None:
    log = """\
[    0.000000] Linux version 6.1.0
[ 3600.100000] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[ 7200.250000] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[ 7300.000001] NVRM: Xid (PCI:0000:86:00): 31, pid=4242, name=python, Ch 00000008, intr 00000000. MMU Fault
[10000.500000] audit: NVRM: Xid (PCI:0000:00:00): 48, quoted by another line
NVRM: Xid (0000:af:00): 95, pid=77, Uncontained ECC error
"""
    found = list(gpus.xid_problems(log, uptime=10800.0))
    assert [level for level, _ in found] == [WARNING, WARNING]
    assert "0000:3b:00 had Xid 79 1.0 h ago: the GPU fell off the bus" in found[0][1]
    assert "0000:af:00 had Xid 95: an uncontained memory error" in found[1][1]
    assert not list(gpus.xid_problems("", uptime=1.0))
