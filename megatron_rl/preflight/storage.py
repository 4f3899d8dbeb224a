"""How fast all ranks together read models and checkpoints, and what that makes of a resume."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from megatron_rl.config.schema import Config
from megatron_rl.preflight.local import checkpoint_bytes, weight_files
from megatron_rl.preflight.verdict import WARNING, Measured, NodeFinding
from megatron_rl.runtime.disk import size_text

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")
_PART = 2**28  # bytes that a rank reads at most
_SECONDS = 5.0  # that it reads at most
_BLOCK = 2**23
_LEAST = 2**26  # bytes of all ranks below which a speed says nothing


class Ranks(Protocol):
    """The collectives that pre-flight needs; `runtime.distributed.ProcessGrid` has them."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def device_group(self) -> dist.ProcessGroup | None: ...

    def all_gather(self, item: T) -> list[T]: ...

    def barrier(self) -> None: ...


def reading(config: Config, ranks: Ranks, measured: Measured) -> list[NodeFinding]:
    """Reads a part of one of the run's checkpoints, or of the model's weights where there is none, on every rank at once.

    What the nodes' memory has of the files is forgotten first, so that the file system is measured. A warning where a resume
    would take long beside the deadline of the phase `load`.
    """
    files = ranks.all_gather([str(path) for path in _files(config)])[0]
    ranks.barrier()
    amount, seconds = _read(files, ranks.rank) if files else (0, 0.0)
    told = ranks.all_gather((amount, seconds))
    total = sum(amount for amount, _ in told)
    if total < _LEAST:
        return []
    speed = total / max(seconds for _, seconds in told)
    measured["read_gb_per_s"] = round(speed / 1e9, 3)
    saved = checkpoint_bytes(config) if config.checkpoint.every else None
    if not saved:
        return []
    minutes = saved / speed / 60
    measured["resume_minutes"] = round(minutes, 1)
    watchdog = config.watchdog
    limit = watchdog.phases.get("load", watchdog.default_minutes)
    if not watchdog.enabled or minutes <= limit / 2:  # other jobs read, too
        return []
    text = (
        f"all ranks together read {speed / 1e9:.2f} GB/s: a checkpoint of about {size_text(saved)} takes {minutes:.0f} min "
        f"to check and up to as long again to load, and a resume has {limit:g} min for each; "
        f"watchdog.phases.load={math.ceil(2 * minutes)}"
    )
    return [NodeFinding("storage", WARNING, "all nodes", text)]


def _files(config: Config) -> Sequence[Path]:
    """Files with tensors: of a checkpoint in the run folder, else of the model."""
    saved = sorted(Path(config.run_dir).glob("checkpoints/step_*/*.distcp"))
    if saved:
        return [path for path in saved if path.parent == saved[0].parent]
    return weight_files(Path(config.model.path).expanduser()) if config.model.path else []


def _read(files: Sequence[str], rank: int) -> tuple[int, float]:
    """Bytes and seconds. Ranks read other parts, as far as the files reach; one that cannot read takes no part."""
    amount, begin = 0, time.perf_counter()
    try:
        with open(files[rank % len(files)], "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            start = rank // len(files) * _PART % max(size, 1)
            os.posix_fadvise(file.fileno(), start, _PART, os.POSIX_FADV_DONTNEED)
            file.seek(start)
            begin = time.perf_counter()
            while amount < _PART and time.perf_counter() - begin < _SECONDS and (block := file.read(_BLOCK)):
                amount += len(block)
    except OSError:  # `check_model` names it
        return 0, 0.0
    return amount, time.perf_counter() - begin
