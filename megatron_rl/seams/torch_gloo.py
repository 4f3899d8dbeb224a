"""torch's gloo groups: one device, with one thread, for all of a process. Written for 2.13."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import cache

import torch.distributed as dist

INIT = "__init__"  # of `dist.ProcessGroupGloo`, compiled: without a signature that could be compared


@cache
def share_device() -> None:
    """Has all gloo groups that this process makes from now on share a device.

    A device's thread wakes every 10 ms to look for what its connections bring. torch makes one per group, and Megatron-Core
    some 30 groups for every rank: their threads took 5 % of the CPU time of the quick start in one process.
    """
    gloo = dist.ProcessGroupGloo
    make: Callable[..., None] = getattr(gloo, INIT)

    def with_device(
        group: dist.ProcessGroupGloo,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta = dist.default_pg_timeout,
    ) -> None:
        options = gloo._Options()  # type: ignore[attr-defined]  # absent from the stubs
        options._devices, options._timeout = [_device()], timeout
        make(group, store, rank, size, options)

    setattr(gloo, INIT, with_device)


@cache
def _device() -> dist.ProcessGroupGloo.Device:
    """On the interface that GLOO_SOCKET_IFNAME names."""
    return dist.ProcessGroupGloo.create_default_device()
