"""The process around vLLM: environment variables before import, shared memory and sockets at its start."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator

from megatron_rl.runtime import device, leftovers
from megatron_rl.runtime.distributed import ProcessGrid
from megatron_rl.seams.vllm_segments import named_segments

_SOCKETS = "VLLM_RPC_BASE_PATH"
# Of `rollout.fp8` on Hopper. By default vLLM 0.32 rounds the scales that it is sent up to powers of two and quantises the
# weights again (utils/deep_gemm.py; Blackwell's kernels want that), and computes the same product by one kernel below 32
# tokens and by another from there on, so that a response's last tokens are not scored as they were drawn.
FP8_VARIABLES = {"VLLM_USE_DEEP_GEMM_E8M0": "0", "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0"}


def prepare(exact: bool = False) -> None:
    """Call before vLLM is imported. Settings that the user, or the launcher, has made in the environment win, but for what
    `rollout.exact` (`exact`) cannot do without."""
    if exact and device.has_gpu():  # its first runner's sampler can be told how to compute log-probs
        os.environ |= {"VLLM_BATCH_INVARIANT": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine lives in this process
    # Models and tokenizers are folders: nothing is to be looked up. The launcher says 0 where a task names a dataset there.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # vLLM 0.32 would choose by itself: its second runner where Triton is. Samplers differ, and with them what a seed draws.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1" if device.has_gpu() else "0")
    # On a CPU vLLM warns at length about what we chose (eager, no Triton) and what a laptop lacks (tcmalloc, libiomp).
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING" if device.has_gpu() else "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_DO_NOT_TRACK", "1")
    if device.is_hopper():
        for name, value in FP8_VARIABLES.items():
            os.environ.setdefault(name, value)


def overridden() -> list[str]:
    """Returns those of `FP8_VARIABLES` that the user has set otherwise, as `NAME=value`: the engine of `rollout.fp8` then
    does not compute with the scales that it is sent, or computes one product by two kernels."""
    if not device.is_hopper():
        return []
    return [
        f"{name}={os.environ[name]}"
        for name, default in FP8_VARIABLES.items()
        if os.environ.get(name, default) != default
    ]


@contextlib.contextmanager
def engine_start(grid: ProcessGrid) -> Iterator[None]:
    """Around the engine's start, on all ranks: the segments and sockets that vLLM makes have no name afterwards.

    Every rank has opened them by then, so no kind of death leaves them. A run that is killed while this runs leaves names
    that `leftovers.remove_abandoned` knows.
    """
    is_first_here = os.environ.get("LOCAL_RANK", str(grid.rank)) == "0"
    if grid.link is not None:
        is_first_here = grid.all_gather(socket.gethostname()).index(socket.gethostname()) == grid.rank
    if is_first_here:
        leftovers.remove_abandoned()  # before a rank of this run makes any: a port's segments may be of an earlier run
    grid.barrier()
    with leftovers.claimed_segments(), named_segments(leftovers.SHARED_MEMORY), _own_sockets(), _own_world(grid):
        try:
            yield
        except OSError as error:  # Python's semaphores lie in shared memory, too, and their error names no path
            if error.errno != errno.ENOSPC or error.filename is not None:
                raise
            raise OSError(error.errno, error.strerror, str(leftovers.SHARED_MEMORY)) from error
        grid.barrier()
        if is_first_here:
            leftovers.remove_segments()


@contextlib.contextmanager
def _own_world(grid: ProcessGrid) -> Iterator[None]:
    """vLLM reads its rank there; with split placement the launcher has counted those that learn, too."""
    names = {"RANK": grid.rank, "WORLD_SIZE": grid.world} if grid.link is not None else {}
    before = {name: os.environ[name] for name in names}
    os.environ.update({name: str(value) for name, value in names.items()})
    try:
        yield
    finally:
        os.environ.update(before)


@contextlib.contextmanager
def _own_sockets() -> Iterator[None]:
    """vLLM puts its sockets' files into a folder of this rank, unless the user has named one."""
    if _SOCKETS in os.environ:
        yield
        return
    with leftovers.claimed_folder() as folder:
        os.environ[_SOCKETS] = str(folder)
        try:
            yield
        finally:
            del os.environ[_SOCKETS]  # what this process starts later must not look there
