"""The site's settings, read from the one file that the batch scripts read too: slurm/site.sh."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.launch.job_plan import LaunchError

_PRINT = """
set -euo pipefail
source "$MEGATRON_RL_HOME/slurm/lib.sh"
load_site
printf '%s\\0' "$TASKS_PER_NODE" "$CPUS_PER_TASK" "$LAUNCHER" "$CONTAINER_IMAGE" "$CONTAINER_MOUNTS" \\
  "$VENV" "$(MEGATRON_RL_HOME=/another/folder && load_site > /dev/null && echo "$VENV")" \\
  "${#SITE_SBATCH[@]}" ${SITE_SBATCH[@]+"${SITE_SBATCH[@]}"} ${SITE_SRUN[@]+"${SITE_SRUN[@]}"}
"""


@dataclass(frozen=True)
class Site:
    """The settings of slurm/site.sh that a launch needs; the job reads the rest."""

    path: Path
    sbatch: tuple[str, ...]  # as on sbatch's command line
    srun: tuple[str, ...]
    tasks_per_node: int
    cpus_per_task: int | None
    launcher: str
    container_image: str | None
    container_mounts: tuple[str, ...]
    venv: str
    venv_in_code: bool  # VENV is written with $MEGATRON_RL_HOME: another one for every copy of the code


def read_site(root: Path, path: Path | None = None) -> Site:
    """Runs the site file (default: `root/slurm/site.sh`) in a shell, as the batch scripts do.

    Raises:
        LaunchError: there is no such file, or it does not say what it must.
    """
    path = path or root / "slurm" / "site.sh"
    done = subprocess.run(
        ["bash", "-c", _PRINT],
        env={**os.environ, "MEGATRON_RL_HOME": str(root), "MEGATRON_RL_SITE": str(path)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise LaunchError(done.stderr.strip().removeprefix("megatron-rl: ") or f"{path} cannot be read by bash")
    tasks, cpus, launcher, image, mounts, venv, elsewhere, count, *options = done.stdout.split("\0")[:-1]
    return Site(
        path=path,
        sbatch=tuple(options[: int(count)]),
        srun=tuple(options[int(count) :]),
        tasks_per_node=int(tasks),
        cpus_per_task=int(cpus) if cpus else None,
        launcher=launcher,
        container_image=image or None,
        container_mounts=tuple(mount for mount in mounts.split(",") if mount),
        venv=venv,
        venv_in_code=venv != elsewhere,
    )
