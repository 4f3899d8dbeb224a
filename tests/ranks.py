"""Ranks of the tests: forked from a process that has imported torch and Megatron-Core, which is most of their start."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable

import torch.multiprocessing as mp

from megatron_rl.seams import torch_dist


def start(function: Callable[..., None], world: int, *arguments: object) -> None:
    """Runs `function(rank, *arguments)` in `world` processes; raises what one raised."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.preloaded"])
    mp.start_processes(_rank, (function, *arguments), nprocs=world, start_method="forkserver")


def _rank(rank: int, function: Callable[..., None], *arguments: object) -> None:
    assert gc.get_freeze_count() > 100_000, "tests.preloaded was not imported, of which `multiprocessing` says nothing"
    torch_dist.share_device()
    function(rank, *arguments)
