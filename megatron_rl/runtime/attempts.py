"""What ranks need before they start: a folder for logs, a rendezvous port, environment variables."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path

_PORTS = range(20000, 32000)  # below the range from which the system hands out ports on its own
ATTEMPT = "MEGATRON_RL_ATTEMPT"  # variable: the folder for this attempt's logs, where a batch script has made it
END = "end"  # in that folder: exit code and rank of the first rank that failed
REFUSED = "refused"  # in that folder: why its command was refused the run folder, which another run holds
_POLL = 0.2  # seconds between two looks for the attempt that rank 0 makes


def rank_environment(gpus: int) -> dict[str, str]:
    """Variables that have to be there before a rank imports torch. Variables that the user has set are not overridden, but
    for Python's UTF-8 mode: torch and vLLM read their own files in the locale's encoding."""
    defaults = {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # keeps the engine's messages out of the live view
        "TORCH_FR_BUFFER_SIZE": "64",  # torch's flight recorder: the last collectives, for a post-mortem
    }
    if gpus:
        defaults["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron's overlap of tensor-parallel communication needs it
    else:
        defaults |= {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return {"PYTHONUTF8": "1", **{name: value for name, value in defaults.items() if name not in os.environ}}


def free_port() -> int:
    """A free port outside the ephemeral range."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise OSError("found no free port for the processes to meet at")


def new_attempt(run_dir: Path) -> Path:
    """Makes and returns the next `logs/attempt_<k>`."""
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    taken = [int(match[1]) for path in logs.iterdir() if (match := re.fullmatch(r"attempt_(\d+)", path.name))]
    attempt = logs / f"attempt_{max(taken, default=0) + 1}"
    attempt.mkdir()
    return attempt


def shared_attempt(run_dir: Path, environment: Mapping[str, str], rank: int, patience: float) -> Path | None:
    """The one `logs/attempt_<k>` of all ranks that srun has started together.

    It is the folder that the batch script names in MEGATRON_RL_ATTEMPT; without it, rank 0's process, which has taken the run
    folder, makes one for this Slurm step, and the others wait for it. None where there is neither: the ranks of a plain
    torchrun write where torchrun says. `patience`: how long to wait for rank 0's, in seconds.

    Raises:
        TimeoutError: it has not made one by then.
    """
    if environment.get(ATTEMPT):
        Path(environment[ATTEMPT]).mkdir(parents=True, exist_ok=True)
        return Path(environment[ATTEMPT])
    if "SLURM_STEP_ID" not in environment:
        return None
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    mark = run_dir / "logs" / (".slurm_" + "_".join(environment.get(name, "0") for name in names))
    if rank == 0 and not mark.is_symlink():
        mark.symlink_to(new_attempt(run_dir).name)
    deadline = time.monotonic() + patience
    while not mark.is_symlink():
        if time.monotonic() > deadline:
            why = f"rank 0 has not taken the run folder within {patience / 60:g} minutes (launch.timeout_minutes)"
            raise TimeoutError(errno.ETIMEDOUT, f"rank {rank} gives up: {why}; see the output of rank 0")
        time.sleep(_POLL)
    return mark.parent / mark.readlink()
