"""The checks of `make setup-gpu`: before anything is installed, and (`installed`) whether what was installed can run here.

Each refusal names the minimum and the remedy. `--no-driver`: for an image that is built where there is no card.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

PYTHON = (3, 12)
DRIVER = 580  # the oldest for CUDA 13
CAPABILITY = (8, 0)
CUDA = 13
LOCK = Path(__file__).parent / "gpu.txt"
# What a compiled engine imports before it touches a card, and with it the compiled parts of other packages. All load without
# NVIDIA's driver.
ENGINE_IMPORTS = (
    "cutlass",
    "flashinfer",
    "quack",
    "tokenspeed_mla",
    "tilelang",
    "vllm",
    "vllm.compilation.passes.pass_manager",
    "vllm.distributed.device_communicators.flashinfer_all_reduce",
)
# These are linked against it.
DRIVER_IMPORTS = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.cumem_allocator",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
    "vllm.third_party.deep_gemm",
    "vllm.compilation.passes.fusion.allreduce_rms_fusion",
    "transformer_engine.pytorch",
)
# And these, which are loaded when a card's kind or a recipe asks for them: `make check-gpu-set` tries them too.
LINKED = ("vllm._flashmla_C", "vllm._flashmla_extension_C", "vllm._flashkda_C", "vllm._qutlass_C", "vllm._deepselect_C")
# Left over from building two wheels; nothing imports it.
STRAY = {"build_backend.py"}


def python_problem(version: tuple[int, int]) -> str | None:
    if version == PYTHON:
        return None
    return f"this is Python {version[0]}.{version[1]}, and it takes 3.12: make setup-gpu PYTHON=/path/to/python3.12"


def card_problems(rows: str) -> list[str]:
    """From nvidia-smi's lines `driver version, compute capability`, one per card."""
    found = []
    for row in dict.fromkeys(rows.split("\n")):
        driver, _, capability = (part.strip() for part in row.partition(","))
        if not driver:
            continue
        if int(driver.partition(".")[0]) < DRIVER:
            found.append(f"the NVIDIA driver is {driver}, and CUDA {CUDA} needs {DRIVER} or newer: have it updated")
        if tuple(map(int, capability.split("."))) < CAPABILITY:
            least = ".".join(map(str, CAPABILITY))
            found.append(
                f"a card has compute capability {capability}, and {least} (A100) is the least: use another node"
            )
    return found or ([] if rows.strip() else ["nvidia-smi names no card: is this a GPU node?"])


def compiler_problem(said: str) -> str | None:
    """From the output of `nvcc --version`."""
    release = re.search(r"release (\d+)\.(\d+)", said)
    if release and int(release[1]) == CUDA:
        return None
    own = f"is CUDA {release[1]}.{release[2]}" if release else "does not tell its release"
    return f"nvcc {own}, and Transformer Engine is compiled with CUDA {CUDA}: set CUDA_HOME to a CUDA {CUDA} toolkit"


def _said(*command: str) -> str | None:
    """Standard output of a program; None where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def before(driver: bool) -> list[str]:
    problems = [python_problem(sys.version_info[:2])]
    if driver:
        rows = _said("nvidia-smi", "--query-gpu=driver_version,compute_cap", "--format=csv,noheader")
        if rows is None:
            problems.append(f"nvidia-smi does not answer; driver {DRIVER} or newer is needed (an image: NO_DRIVER=1)")
        else:
            problems += card_problems(rows)
    nvcc = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
    said = _said(str(nvcc), "--version")
    problems.append(
        f"no {nvcc}: set CUDA_HOME to a CUDA {CUDA} toolkit, which Transformer Engine is compiled with"
        if said is None
        else compiler_problem(said)
    )
    return [problem for problem in problems if problem]


def overwritten(packages: Iterable[Distribution]) -> list[str]:
    """Packages of which one has overwritten files of another, by what each says that its files hold.

    No resolver looks for that: of two packages with a file each of the same name, the one that is installed last wins.
    """
    owners: dict[str, dict[str, str]] = defaultdict(dict)  # file -> package -> hash
    for package in packages:
        name = package.metadata["Name"]
        for file, sha256, _ in csv.reader((package.read_text("RECORD") or "").splitlines()):
            if sha256 and file not in STRAY:
                owners[file][name] = sha256
    shared: dict[str, list[str]] = defaultdict(list)
    for file, hashes in owners.items():
        if len(set(hashes.values())) > 1:
            shared[" and ".join(sorted(hashes))].append(file)
    return [
        f"{names} overwrite one another, {len(files)} files, such as {files[0]}: pin versions that do not in "
        "requirements/gpu.in, make gpu-lock"
        for names, files in shared.items()
    ]


def locked(text: str) -> dict[str, str]:
    """Package to version, of a file of pins."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))


def unlocked(packages: Iterable[Distribution], pins: dict[str, str]) -> list[str]:
    """Packages of the lock that are missing or of another version."""
    found = {re.sub(r"[-_.]+", "-", package.metadata["Name"]).lower(): package.version for package in packages}
    wrong = [
        f"{name} is {found.get(name, 'missing')}, not {version}"
        for name, version in pins.items()
        if found.get(name, "").partition("+")[0] != version
    ]
    return [f"not what requirements/gpu.txt pins: {', '.join(wrong)}: make clean setup-gpu"] if wrong else []


def unimportable(names: Iterable[str]) -> list[str]:
    """Any error counts: a package that was overwritten raises AttributeError, a cache without a place FileNotFoundError."""
    problems = []
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            problems.append(f"{name} cannot be imported: {type(error).__name__}: {error}")
    return problems


def installed(driver: bool) -> list[str]:
    packages = list(distributions())
    problems = unlocked(packages, locked(LOCK.read_text())) + overwritten(packages)
    if importlib.util.find_spec("transformer_engine_torch") is None:
        problems.append("transformer_engine_torch did not come with the rest")
    problems += unimportable(("torch", *ENGINE_IMPORTS, *(DRIVER_IMPORTS if driver else ())))
    if problems:
        return problems
    import torch

    if torch.version.cuda is None:
        return [f"torch {torch.__version__} is no CUDA build: the index in use has another one of the same version"]
    if driver and not torch.cuda.is_available():
        return [f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no card that it can use"]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("when", choices=("before", "installed"))
    parser.add_argument("--no-driver", action="store_true")
    args = parser.parse_args()
    problems = (before if args.when == "before" else installed)(not args.no_driver)
    for problem in problems:
        print(f"setup-gpu: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
