"""What vLLM needs from the process around it: environment variables before import, shared memory, quiet logs."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path

from megatron_rl.runtime import device

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "megatron_rl-"  # cpu_worker.SEGMENT_PREFIX, which cannot be imported before vLLM may be
_SOCKETS = "VLLM_RPC_BASE_PATH"


def prepare(rank: int) -> None:
    """Call before vLLM is imported. Settings that the user has made in the environment win."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine lives in this process
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # On a CPU vLLM warns at length about what we chose (eager, no Triton) and what a laptop lacks (tcmalloc, libiomp).
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING" if device.has_gpu() else "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_DO_NOT_TRACK", "1")
    # vLLM leaves its sockets' files in the temporary folder, where they would pile up over a node's life.
    if _SOCKETS not in os.environ:
        temporary = tempfile.gettempdir()
        # A socket's path has at most 107 characters; the folder's name and the socket's take 59.
        os.environ[_SOCKETS] = tempfile.mkdtemp(prefix=_PREFIX, dir=temporary if len(temporary) <= 48 else "/tmp")
    if not device.has_gpu() and rank == 0:
        remove_stale_shared_memory()


def remove_stale_shared_memory() -> list[str]:
    """Deletes the segments of killed runs of ours, which nobody else would: those no living process has mapped.

    Returns their names.
    """
    stale = {segment.name for segment in _SHARED_MEMORY.glob(f"{_PREFIX}*")} - _mapped_segments()
    for name in stale:
        (_SHARED_MEMORY / name).unlink(missing_ok=True)
    return sorted(stale)


def unlink_own_shared_memory() -> None:
    """Removes the names of this run's segments once every rank has mapped them, so that no kind of death leaves them."""
    for segment in _SHARED_MEMORY.glob(f"{_PREFIX}{os.environ['MASTER_PORT']}-*"):
        segment.unlink(missing_ok=True)


def remove_sockets() -> None:
    """Removes the socket files of this rank's engine once every rank has connected: connections outlive them."""
    folder = Path(os.environ[_SOCKETS])
    if folder.name.startswith(_PREFIX):
        shutil.rmtree(folder)
        del os.environ[_SOCKETS]  # what this process starts later must not look there


def _mapped_segments() -> set[str]:
    """Names under /dev/shm that some living process has mapped."""
    names = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:  # the process ended, or is not ours
            continue
        names |= {Path(line.split()[-1]).name for line in lines if str(_SHARED_MEMORY) in line}
    return names


class _ReloadNoise(logging.Filter):
    """vLLM warns at every weight sync about rotary embeddings, which have no weights."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "RotaryEmbedding: Failed to load weights" not in record.getMessage()


def quiet_reload_messages() -> None:
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(_ReloadNoise())
