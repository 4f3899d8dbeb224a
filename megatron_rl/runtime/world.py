"""Detection of an outer launcher (torchrun, srun) that has started this process as one of several."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_FIRST_PORT, _PORTS = 20000, 12000  # below the range from which systems hand out ports on their own


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
    return _FIRST_PORT + step % _PORTS
