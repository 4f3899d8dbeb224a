"""The checks of `make setup-gpu`: before anything is installed, and (`installed`) whether what was installed can run here.

Each refusal names the minimum and the remedy. `--no-driver`: for an image that is built where there is no card.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

PYTHONS = ((3, 11), (3, 12))
DRIVER = 580  # the oldest for CUDA 13
CAPABILITY = (8, 0)
CUDA = 13


def python_problem(version: tuple[int, int]) -> str | None:
    if version in PYTHONS:
        return None
    names = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
    return f"this is Python {version[0]}.{version[1]}, and it takes {names}: make setup-gpu PYTHON=python3.12"


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


def installed(driver: bool) -> list[str]:
    try:
        import torch

        for name in ("transformer_engine.pytorch", "vllm") if driver else ():  # these load NVIDIA's driver
            importlib.import_module(name)
    except (ImportError, OSError) as error:
        return [f"something that was installed cannot be imported: {error}"]
    missing = [name for name in ("transformer_engine_torch", "vllm") if importlib.util.find_spec(name) is None]
    if missing:
        return [f"{' and '.join(missing)} did not come with the rest"]
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
