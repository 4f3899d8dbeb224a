"""The first step of `make setup` (`before`), one in its middle (`index`) and its last: is this a machine for it, where
is torch built for CPUs, and can it run what was installed?

Prints the remedy where not. `before` runs in whatever python3 is there, the others in the environment.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import urllib.error
import urllib.request

OLDEST = (3, 8)  # of the python3 that makes .uv, which brings the 3.12 for all else
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def problem(system: str, machine: str, python: tuple[int, int]) -> str | None:
    """Why the pinned packages are not for this machine, before anything is downloaded; None where they are."""
    if (system, machine) != ("Linux", "x86_64"):
        return (
            f"the pinned packages are for Linux on x86_64, and this is {system} on {machine}: use a machine or container of "
            "that kind (on Windows WSL 2). `pip install .` alone, which checks recipes and plans, needs none of them"
        )
    if python < OLDEST:
        return (
            f"python3 is {python[0]}.{python[1]}, which is too old to run pip and uv: put a newer one first on the PATH"
        )
    return None


def before() -> int:
    refusal = problem(platform.system(), platform.machine(), sys.version_info[:2])
    if refusal is not None:
        print(refusal, file=sys.stderr)
    return int(refusal is not None)


def index(url: str = CPU_INDEX, timeout: float = 5) -> str:
    """PyTorch's index of CPU builds (0.2 GB) where it answers, else `none`: the package index's build brings CUDA, 5 GB."""
    try:
        with urllib.request.urlopen(f"{url}/torch/", timeout=timeout):
            return url
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return "none"


def main() -> int:
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        print(
            f"torch cannot be imported ({error}); its CPU build: make clean setup TORCH_INDEX={CPU_INDEX}",
            file=sys.stderr,
        )
        return 1
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        print("vLLM needs the system library libnuma.so.1; on Debian and Ubuntu: apt install libnuma1", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    command = sys.argv[1:]
    if command == ["index"]:
        print(index())
        sys.exit()
    sys.exit(before() if command == ["before"] else main())
