"""The machine that a recipe is checked for: its GPUs, found without torch, and the processes that a launcher has started."""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """Where the processes run: this machine's GPUs, and the world that another launcher has started."""

    gpus: int = 0
    world_size: int | None = None  # processes in all, where torchrun or srun started them
    local_world_size: int | None = None  # those of them on this machine

    @staticmethod
    def here() -> Machine:
        return Machine(gpus=count_gpus())


def count_gpus(devices: Path = Path("/dev")) -> int:
    """GPUs that this process may use, found without torch: device files, narrowed by CUDA_VISIBLE_DEVICES."""
    present = sum(re.fullmatch(r"nvidia[0-9]+", path.name) is not None for path in devices.glob("nvidia[0-9]*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    chosen = itertools.takewhile(lambda part: part.strip() not in ("", "-1"), visible.split(","))  # CUDA stops there
    return min(present, len(list(chosen)))
