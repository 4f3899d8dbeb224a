"""Warnings of other libraries as they are imported and used, which ask nothing of a user of this package."""

from __future__ import annotations

import warnings


def quiet_known_warnings() -> None:
    """Ignores what Megatron-Core says of optional parts that are missing, and torch's deprecations."""
    warnings.filterwarnings("ignore", message="Apex is not installed")
    warnings.filterwarnings("ignore", message="When using async grad allreduce it is recommended")
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf Tensor")
    warnings.filterwarnings("ignore", message="`torch.distributed.reduce_op` is deprecated")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\..*")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch\.distributed|megatron\.core)\..*")
