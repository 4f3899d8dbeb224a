"""What the compiled part says about the machine."""

from __future__ import annotations


def get_cublasLt_version() -> int:
    return 130000


def get_cudnn_version() -> int:
    return 92000


def get_num_cublas_streams() -> int:
    return 4


def device_supports_multicast(device_id: int = -1) -> bool:
    return False
