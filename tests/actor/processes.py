"""Starting ranks for the tests of this folder."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import torch

from tests import ranks


def spawn(function: Callable[..., None], world: int, *arguments: object) -> None:
    """Runs `function(*arguments)` on `world` ranks that find each other by the environment; raises what one raised."""
    ranks.start(run_rank, world, world, free_port(), function, arguments)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_rank(rank: int, world: int, port: int, function: Callable[..., None], arguments: tuple[object, ...]) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    function(*arguments)
