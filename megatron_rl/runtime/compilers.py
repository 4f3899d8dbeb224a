"""Compilers of kernels during a run: where it keeps what it has made, and the programs that it calls. Needs no torch."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from megatron_rl.config import ConfigError

CACHE = "MEGATRON_RL_CACHE"  # variable: the folder of all caches
# Variable that names a cache -> its folder there. vLLM 0.32 puts torch's for its own graphs into its root, and leaves
# Triton's where it is set (compilation/compiler_interface.py). Without these all but torch's are in the home folder.
CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TILELANG_CACHE_DIR": "tilelang",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "CUDA_CACHE_PATH": "cuda",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
}
NVCC = (12, 9)  # the oldest that vLLM's DeepGEMM takes


def cache_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of `CACHES`, but for those that are set.

    One folder on the node's own disk: a home that all nodes share would have every rank write there at once, and a container
    may have none. Kernels are programs and pickles, so the folder must be nobody else's.

    Raises:
        ConfigError: the default folder belongs to another user, or others may write there.
    """
    given = environment.get(CACHE)
    root = Path(given).expanduser() if given else _own_folder() / "cache"
    return {name: str(root / folder) for name, folder in CACHES.items() if not environment.get(name)}


def _own_folder() -> Path:
    """This user's, in the folder for temporary files; made where that is possible (pre-flight says where it is not)."""
    folder = Path(tempfile.gettempdir()) / f"megatron_rl-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
    except OSError:
        return folder
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise ConfigError(
            f"{folder}, where compiled kernels are kept, is not a folder that only you can write to; remove it, or name "
            f"another one on the node's own disk: {CACHE}=FOLDER"
        )
    return folder


def search_path(environment: Mapping[str, str]) -> str:
    """PATH with the programs of this Python's environment, where it lacks them: FlashInfer looks for `ninja` there."""
    own, path = str(Path(sys.executable).parent), environment.get("PATH", os.defpath)
    return path if own in path.split(os.pathsep) else os.pathsep.join((own, path))


def nvcc(environment: Mapping[str, str]) -> str | None:
    """The CUDA compiler that FlashInfer and DeepGEMM would call; None where there is none."""
    found = shutil.which("nvcc", path=environment.get("PATH"))
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if not home:
        return found or shutil.which("/usr/local/cuda/bin/nvcc")
    return shutil.which(f"{home}/bin/nvcc")


def nvcc_version(program: str) -> tuple[int, int] | None:
    """Its release, for example (13, 0); None where it does not say."""
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"release (\d+)\.(\d+)", said)
    return found and (int(found[1]), int(found[2]))


def programs(environment: Mapping[str, str]) -> dict[str, str | None]:
    """`nvcc` and `ninja`, None where they are not found. vLLM goes without FlashInfer where one is missing."""
    return {"nvcc": nvcc(environment), "ninja": shutil.which("ninja", path=environment.get("PATH"))}
