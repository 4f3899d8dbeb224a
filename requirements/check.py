"""The first step of `make setup` (`before`) and its last: is this a machine for it, and can it run what was installed?

Prints the remedy where not. What follows on the command line, such as PYTHON=..., is repeated in remedies.
"""

from __future__ import annotations

import ctypes
import platform
import sys

PYTHONS = ((3, 11), (3, 12))
CPU_INDEX = " ".join(["make clean setup TORCH_INDEX=https://download.pytorch.org/whl/cpu", *sys.argv[1:]])


def problem(system: str, machine: str, python: tuple[int, int]) -> str | None:
    """Why the pinned packages are not for this machine, before anything is downloaded; None where they are."""
    if (system, machine) != ("Linux", "x86_64"):
        return (
            f"the pinned packages are for Linux on x86_64, and this is {system} on {machine}: use a machine or container of "
            "that kind (on Windows WSL 2). `pip install .` alone, which checks recipes and plans, needs none of them"
        )
    if python not in PYTHONS:
        return f"this is Python {python[0]}.{python[1]}, and the pinned packages are for 3.11 and 3.12: make setup PYTHON=..."
    return None


def before() -> int:
    found = problem(platform.system(), platform.machine(), sys.version_info[:2])
    if found is not None:
        print(found, file=sys.stderr)
    return int(found is not None)


def main() -> int:
    try:
        import torch
    except (ImportError, OSError) as error:
        print(f"torch cannot be imported ({error}); for its CPU build: {CPU_INDEX}", file=sys.stderr)
        return 1
    if torch.version.cuda is not None:
        print(f"torch is a build for CUDA {torch.version.cuda}; for the CPU build: {CPU_INDEX}", file=sys.stderr)
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        print("vLLM needs the system library libnuma.so.1; on Debian and Ubuntu: apt install libnuma1", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(before() if sys.argv[1:] == ["before"] else main())
