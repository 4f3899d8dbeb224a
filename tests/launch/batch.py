"""A batch script's run with stand-ins for Slurm's own programs, for any cluster; test_slurm.py runs them on a real one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from . import jobs
from .jobs import REPOSITORY

GOLDEN = Path(__file__).parent / "golden"
# scontrol of a cluster whose nodes gpu<n> have addresses of their own, and an srun that only says what it was asked.
SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
  "show hostnames") for i in $(seq -f %03g 3 $((2 + SLURM_JOB_NUM_NODES))); do echo "gpu$i"; done ;;
  "show node") echo "NodeName=$4 Arch=x86_64 NodeAddr=10.0.0.${4#gpu} NodeHostName=$4" ;;
  "show job") echo "JobId=$4 JobState=${JOB_STATE:-RUNNING} Restarts=${RESTARTS:-0} EndTime=2099-01-01T00:00:00 StdOut=/x" ;;
  *) echo "scontrol $*" >> "$RECORD" ;;
esac
"""
SRUN = """#!/usr/bin/env bash
{
  echo "MASTER_ADDR=${MASTER_ADDR:-} MASTER_PORT=${MASTER_PORT:-} ATTEMPT=${MEGATRON_RL_ATTEMPT:-}"
  printf '%s\\n' srun "$@"
} >> "$RECORD"
[[ ${!#} != true ]] || exit "${NODE_LOST:-0}"
exit "${SRUN_EXIT:-0}"
"""
STAND_INS = {
    "scontrol": SCONTROL,
    "srun": SRUN,
    "squeue": '#!/bin/sh\n[ -z "${IN_QUEUE:-}" ] || echo "$IN_QUEUE"\n',
    "sleep": '#!/bin/sh\necho "sleep $1" >> "$RECORD"\n',
}


class Batch:
    """A batch script's run with stand-ins; `record` is what it asked srun and scontrol to do."""

    def __init__(
        self, folder: Path, script: str, *arguments: str, nodes: int = 1, site: str = "", srun: str = SRUN, **own: str
    ) -> None:
        programs = folder / "bin"
        programs.mkdir(parents=True, exist_ok=True)
        for name, text in {**STAND_INS, "srun": srun}.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        (folder / "site.sh").write_text(f"VENV={jobs.VENV}\nTASKS_PER_NODE=8\nCPUS_PER_TASK=14\n{site}\n")
        self.folder, self.path = folder, folder / "record"
        variables = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "RECORD": str(self.path),
            "MEGATRON_RL_HOME": str(REPOSITORY),
            "MEGATRON_RL_SITE": str(folder / "site.sh"),
            "SLURM_JOB_ID": "1234",
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_JOB_NODELIST": f"gpu[003-{nodes + 2:03d}]",
            "SLURM_GPUS_ON_NODE": "8",
        }
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        command = ["bash", str(REPOSITORY / "slurm" / f"{script}.sbatch"), *arguments]
        done = subprocess.run(command, env=kept | variables | own, capture_output=True, text=True)
        self.code, self.stderr = done.returncode, done.stderr

    @property
    def record(self) -> str:
        text = self.path.read_text() if self.path.exists() else ""
        return text.replace(str(self.folder), "FOLDER").replace(str(REPOSITORY), "HOME")


def compare(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"not as in {path}; if that is right: WRITE_GOLDEN=1, and look at the change"
