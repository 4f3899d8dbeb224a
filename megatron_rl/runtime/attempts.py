"""Preparations of ranks: the world that an outer launcher (torchrun, srun) has made, or a port to meet at; a
folder for logs; environment variables."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.runtime import compilers, cudnn

_PORTS = range(20000, 32000)  # below the range from which the system hands out ports on its own
ATTEMPT = "MEGATRON_RL_ATTEMPT"  # variable: the folder for this attempt's logs, where a batch script has made it
END = "end"  # in that folder: exit code and rank of the first rank that failed
REFUSED = "refused"  # in that folder: why its command was refused the run folder, which another run holds
_POLL = 0.2  # seconds between two looks for the attempt that rank 0 makes


@dataclass(frozen=True)
class World:
    """Variables that `torch.distributed` reads, and the two sizes."""

    variables: dict[str, str]
    size: int
    local_size: int | None  # None where the launcher does not say

    @property
    def rank(self) -> int:
        return int(self.variables["RANK"])


def outer_world(environment: Mapping[str, str]) -> World | None:
    """The world that torchrun or srun made around this process; None where it was started on its own.

    Under srun with several tasks, one task is one rank; MASTER_ADDR and MASTER_PORT are kept where they are set.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        local = environment.get("LOCAL_WORLD_SIZE")
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        variables = {name: environment[name] for name in names if name in environment}
        return World(variables, int(environment["WORLD_SIZE"]), None if local is None else int(local))
    # A batch script or a shell of salloc also has SLURM_PROCID; only a task of srun has a step.
    if "SLURM_STEP_ID" not in environment or int(environment.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return None
    size = int(environment["SLURM_STEP_NUM_TASKS"])
    local_size = _tasks_per_node(environment)[int(environment["SLURM_NODEID"])]
    variables = {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or _master(environment),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(_port(environment)),
    }
    return World(variables, size, local_size)


def _tasks_per_node(environment: Mapping[str, str]) -> list[int]:
    """SLURM_STEP_TASKS_PER_NODE, for example `2(x3),1`, as [2, 2, 2, 1]."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment["SLURM_STEP_TASKS_PER_NODE"]):
        counts += [int(count)] * int(times or 1)
    return counts


def _master(environment: Mapping[str, str]) -> str:
    """The step's first node: `gpu[003-010,12],login` -> gpu003."""
    if environment.get("SLURM_STEP_NUM_NODES") == "1":
        return "127.0.0.1"
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", environment["SLURM_STEP_NODELIST"])
    assert first is not None
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def _port(environment: Mapping[str, str]) -> int:
    """The same on all nodes, another one for every step and after every requeue: what an attempt left running on a node
    that was given up must not be taken for the new one."""
    step = int(environment["SLURM_JOB_ID"]) * 101 + int(environment["SLURM_STEP_ID"])
    step += int(environment.get("SLURM_RESTART_COUNT", "0")) * 7
    return _PORTS[step % len(_PORTS)]


def rank_environment(gpus: int) -> dict[str, str]:
    """Variables that have to be there before a rank imports torch. Variables that the user has set are not overridden (an
    empty one counts as unset), but for Python's UTF-8 mode: torch and vLLM read their own files in the locale's encoding.
    PATH gets this Python's programs, and on a GPU LD_LIBRARY_PATH its cuDNN.

    Raises:
        ConfigError: on a GPU, where the folder for compiled kernels is not safe to use.
    """
    defaults = {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # keeps the engine's messages out of the live view
        "TORCH_FR_BUFFER_SIZE": "64",  # torch's flight recorder: the last collectives, for a post-mortem
    }
    if gpus:
        defaults["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron's overlap of tensor-parallel communication needs it
        # A package of vLLM's, for quantised weights that are not used here, compiles in the background once it is imported:
        # its threads and processes would keep ranks from being forks.
        defaults["HUMMING_DISABLE_PARALLEL_BUILD"] = "1"
        defaults |= compilers.cache_variables(os.environ)
    else:
        defaults |= {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        # Threads of a process that wait for each other sleep. libgomp's spin, on the core that the awaited one needs.
        defaults["OMP_WAIT_POLICY"] = "passive"
    return {
        "PYTHONUTF8": "1",
        "PATH": compilers.search_path(os.environ),
        **(cudnn.library_variables(os.environ) if gpus else {}),
        **{name: value for name, value in defaults.items() if not os.environ.get(name)},
    }


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
