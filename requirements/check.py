"""The last step of `make setup`: is what was installed what this machine can run? Prints the remedy where it is not."""

import ctypes
import sys

CPU_INDEX = "make clean setup TORCH_INDEX=https://download.pytorch.org/whl/cpu"


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
    sys.exit(main())
