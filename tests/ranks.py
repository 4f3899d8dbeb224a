"""Ranks of the tests: forked from a process that has imported torch and Megatron-Core, which is most of their start."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import torch.multiprocessing as mp

from megatron_rl.seams import torch_dist

IMPORTED = (
    "megatron_rl.actor.actor",
    "megatron_rl.checkpoint.store",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.dist_checkpointing",
    "transformers",
)


def start(function: Callable[..., None], world: int, *arguments: object) -> None:
    """Runs `function(rank, *arguments)` in `world` processes; raises what one raised."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(IMPORTED))
    mp.start_processes(_rank, (function, *arguments), nprocs=world, start_method="forkserver")


def _rank(rank: int, function: Callable[..., None], *arguments: object) -> None:
    torch_dist.share_device()
    function(rank, *arguments)
