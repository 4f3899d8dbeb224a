"""A real Slurm on this host: munged, slurmctld and two slurmd, in a folder and on ports of their own.

`Cluster.stop` ends what it started. Where the tests are killed, the daemons die with them, and a watcher (this file, run as
a script) ends the jobs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

NODES = ("n1", "n2")
SPARE = "n3"  # known to Slurm, and down until a test starts it
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
_PR_SET_PDEATHSIG = 1
_PREFIX = "mrl-slurm-"

_CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
MessageTimeout=10
KillWait=10
InactiveLimit=0
WaitTime=0
MinJobAge=3600
TCPTimeout=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=normal Nodes=n1,n2,n3 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=300 OverSubscribe=NO
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF OverSubscribe=NO
"""
_NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 CoresPerSocket=8 RealMemory=4000"


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]


def _path() -> str:
    return os.environ["PATH"] + ":/usr/sbin:/sbin"


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _hear_of_parents_death() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until `watch` waits for it
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def wait_until(condition: Callable[[], object], seconds: float = 120, what: object = "what was waited for") -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what() if callable(what) else what} did not come in {seconds} s"
        time.sleep(0.2)


class Cluster:
    """Nodes n1 and n2, of eight processors each, and a spare; partitions `normal` (preemptible, 300 s of grace), `urgent`."""

    def __init__(self) -> None:
        end_leftovers()
        self.folder = folder = Path(
            tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir="/tmp")
        )  # sockets: short path
        self.config = folder / "slurm.conf"
        self.venv = folder / "venv"  # made by the fixture
        self._daemons: dict[str, subprocess.Popen[bytes]] = {
            "watcher": subprocess.Popen(
                (sys.executable, __file__, str(folder)), preexec_fn=_hear_of_parents_death, start_new_session=True
            )
        }

    # ------------------------------------------------------------------------------------------------- bringing up, down
    def start(self) -> None:
        folder, host = self.folder, socket.gethostname()
        folder.chmod(0o755)
        for name in ("state", *(f"spool-{node}" for node in (*NODES, SPARE))):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        ports = _free_ports(4)
        nodes = "\n".join(
            _NODE.format(name=name, host=host, port=port) for name, port in zip((*NODES, SPARE), ports[1:], strict=True)
        )
        self.config.write_text(_CONFIG.format(folder=folder, host=host, controller_port=ports[0], nodes=nodes))
        self._daemon(
            "munged",
            *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"),
            *(f"--log-file={folder}/munged.log", f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munge.seed"),
        )
        wait_until((folder / "munge.socket").exists, 20, "munged")
        self._daemon("slurmctld", "slurmctld", "-D", "-f", str(self.config))
        for name in NODES:
            self.start_node(name)
        wait_until(lambda: self.states() == dict.fromkeys(NODES, "idle"), 60, self._trouble)

    def _trouble(self) -> str:
        tails = (path.read_text(errors="replace")[-1500:] for path in sorted(self.folder.glob("*.log")))
        return f"a cluster with idle nodes (now {self.states()}; logs: " + "\n".join(tails) + ")"

    def stop(self) -> None:
        for name in (*NODES, SPARE, "slurmctld", "munged"):
            self.kill(name)
        _clear(self.folder)
        self.kill("watcher")

    def _daemon(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self.environment(),
                preexec_fn=_die_with_parent,
                start_new_session=True,
            )

    def start_node(self, name: str) -> None:
        self._daemon(name, "slurmd", "-D", "-N", name, "-f", str(self.config))

    def kill(self, name: str) -> None:
        """SIGKILL to a daemon: a node's goes down as with a pulled plug, but for what runs on it."""
        daemon = self._daemons.pop(name, None)
        if daemon is not None:
            daemon.kill()
            daemon.wait()

    def power_off(self, name: str) -> None:
        """A node with all that Slurm has started on it."""
        self.kill(name)
        tasks = self.processes_on(name)
        _kill_all([*_step_daemons(tasks), *tasks])

    def processes_on(self, name: str) -> list[int]:
        """Processes of jobs on a node."""
        return _processes(f"SLURM_CONF={self.config}", f"SLURMD_NODENAME={name}")

    # ------------------------------------------------------------------------------------------------------------- using
    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "SBATCH", "MEGATRON_RL", "SQUEUE"))
        }
        own = {"SLURM_CONF": str(self.config), "PATH": _path(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return {**kept, **own, **(extra or {})}

    def run(self, *command: str, environment: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """Standard output of a command that has to succeed."""
        done = subprocess.run(
            command, env=self.environment(environment), cwd=cwd, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def states(self) -> dict[str, str]:
        done = subprocess.run(
            ("sinfo", "--noheader", "--Node", "--format=%N %t", "--partition=normal"),
            env=self.environment(),
            capture_output=True,
            text=True,
        )
        found = dict(line.split() for line in done.stdout.splitlines())
        return {name: found[name] for name in NODES if name in found}

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says of a job or array task: JobState, Restarts, Reason, ExitCode, ..."""
        command = ("scontrol", "show", "job", "--oneliner", number)
        for _ in range(3):  # a busy controller hangs up: SIGPIPE
            done = subprocess.run(command, env=self.environment(), capture_output=True, text=True, timeout=120)
            if done.returncode != -signal.SIGPIPE:
                break
            time.sleep(0.5)
        assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return dict(re.findall(r"(\S+?)=(\S*)", done.stdout))

    def state(self, number: str) -> str:
        return self.job(number)["JobState"]

    def wait_for_state(self, number: str, *states: str, seconds: float = 300) -> str:
        """Waits for one of the states; a requeued job is let start at once (Slurm has it wait two minutes)."""
        deadline = time.monotonic() + seconds
        while True:
            job = self.job(number)
            if job["JobState"] in states:
                return job["JobState"]
            if job["JobState"] == "PENDING" and job.get("Reason") == "BeginTime":
                subprocess.run(
                    ("scontrol", "update", f"JobId={number}", "StartTime=now"),
                    env=self.environment(),
                    capture_output=True,
                )
            ended = job["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
            assert not ended, f"job {number} ended as {job['JobState']}, not {states}:\n{self.output(number)}"
            assert time.monotonic() < deadline, f"job {number} is {job['JobState']}:\n{self.output(number)}"
            time.sleep(0.2)

    def output(self, number: str) -> str:
        path = Path(self.job(number).get("StdOut", ""))
        return path.read_text(errors="replace")[-6000:] if path.is_file() else f"(no output at {path})"


def _processes(*variables: str) -> list[int]:
    """Living processes that have all these variables in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if all(variable.encode() in environment for variable in variables):
            found.append(int(path.name))
    return found


def _step_daemons(tasks: list[int]) -> set[int]:
    """The slurmstepd above each task."""
    found = set()
    for pid in tasks:
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if Path(f"/proc/{parent}/comm").read_text().startswith("slurmstepd"):
                found.add(parent)
        except OSError:
            continue
    return found


def _kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _clear(folder: Path) -> None:
    """Ends what runs on a cluster without daemons, and removes its folder."""
    deadline = time.monotonic() + 20
    while (left := _processes(f"SLURM_CONF={folder / 'slurm.conf'}")) and time.monotonic() < deadline:
        _kill_all(left)  # what one of them has just started is seen the next time
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


def end_leftovers() -> None:
    """Jobs of clusters whose tests were killed together with their watcher."""
    for folder in Path("/tmp").glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _clear(folder)


if __name__ == "__main__":
    signal.sigwait({signal.SIGTERM})  # the tests' process has gone
    _clear(Path(sys.argv[1]))
