"""Tasks as an experiment of NeMo-Run: on this machine, or on Slurm from a login node or from elsewhere over SSH.

The batch script is NeMo-Run's; what happens around its srun (site settings, the recipe's check, logs per attempt, requeue
and resume) is slurm/lib.sh, as for the scripts in slurm/. Importing this module imports NeMo-Run, which lives in an
environment of its own (requirements/launch.txt).

    from megatron_rl import launch
    from megatron_rl.launch import nemo
    tasks = launch.chain("recipes/my.yaml", ["trainer.steps=100"], processes=16, root=Path.cwd())
    executor = nemo.slurm(launch.read_site(Path.cwd()), root=Path.cwd(), nodes=2)
    nemo.submit(nemo.experiment("my-chain", tasks, executor), wait=False)
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import nemo_run as run
from invoke.exceptions import UnexpectedExit

from megatron_rl.launch.job_plan import LaunchError, Task
from megatron_rl.launch.package import pack
from megatron_rl.launch.site import Site

NOTICE = "USR1@180"  # to the ranks, this many seconds before the time limit
# Options of sbatch that are fields of SlurmExecutor; the others are passed through as they are.
_FIELDS = ("account", "partition", "time", "qos", "mem", "constraint", "exclude", "gres", "comment")
_SHORT = {"-A": "account", "-p": "partition", "-t": "time", "-q": "qos", "-C": "constraint", "-x": "exclude"}

_SETUP = """\
set +vx
# the code that was packaged lies beside this job's output
MEGATRON_RL_HOME=$(scontrol show job --oneliner "$SLURM_JOB_ID" | sed -n 's/.* StdOut=\\([^ ]*\\)\\/[^ ]*.*/\\1/p')/code
export MEGATRON_RL_HOME
source "$MEGATRON_RL_HOME/slurm/lib.sh"
enter_home
unset SLURM_UNBUFFEREDIO # of NeMo-Run's: srun would give the ranks a terminal, and the log their progress bars
"""


@dataclass(kw_only=True)
class WorkTreePackager(run.Packager):
    """The work tree as it is: tracked files with uncommitted edits, new files that git does not ignore, and the site file.

    `venv` is the work tree's own environment where the site file means that one: it is not in the copy.
    """

    root: str = ""
    site: str = ""
    venv: str = ""

    def package(self, path: Path, job_dir: str, name: str) -> str:
        archive = Path(job_dir) / f"{name}.tar.gz"
        if not archive.exists():
            pack(Path(self.root), Path(self.site), archive, self.venv)
        return str(archive)


def local(root: Path) -> run.LocalExecutor:
    """Runs the work tree itself, on this machine, one task after the other."""
    return run.LocalExecutor(ntasks_per_node=1, env_vars={"MEGATRON_RL_HOME": str(root)})


def slurm(
    site: Site,
    root: Path,
    nodes: int = 1,
    processes_per_node: int | None = None,
    sbatch: Sequence[str] = (),
    tunnel: run.SSHTunnel | None = None,
) -> run.SlurmExecutor:
    """An executor with the site's settings.

    Args:
        root: the work tree that is packaged.
        processes_per_node: instead of the site's TASKS_PER_NODE.
        sbatch: further options, as on sbatch's command line; they win over the site's.
        tunnel: how to reach the login node; None where this is one.
    """
    options = _options([*site.sbatch, *sbatch])
    for name in ("nodes", "output", "error"):  # NeMo-Run's own: the job finds its code beside its output
        options.pop(name, None)
    fields = {"account": None} | {name: options.pop(name) for name in _FIELDS if name in options}
    signal = options.pop("signal", NOTICE)
    assert isinstance(signal, str)
    per_node = processes_per_node or site.tasks_per_node
    by_torchrun = site.launcher == "torchrun"
    cpus = site.cpus_per_task
    if cpus is not None and by_torchrun:
        cpus *= per_node
    return run.SlurmExecutor(
        **fields,
        nodes=nodes,
        ntasks_per_node=1 if by_torchrun else per_node,
        cpus_per_task=cpus,
        signal=signal.removeprefix("B:"),  # NeMo-Run's batch script does not listen; the ranks do
        job_name_prefix="megatron-rl.",
        container_image=site.container_image,
        container_mounts=list(site.container_mounts),
        srun_args=["--distribution=block", "--overlap", *([f"--cpus-per-task={cpus}"] if cpus else []), *site.srun],
        additional_parameters={**options, "requeue": True},
        env_vars={"MEGATRON_RL_TASKS_PER_NODE": str(per_node)},
        tunnel=tunnel or run.LocalTunnel(job_dir=""),
        packager=WorkTreePackager(
            root=str(root),
            site=str(site.path.resolve()),
            venv=site.venv if site.venv_in_code and not site.container_image else "",
        ),
        poll_estimated_start_time=False,
    )


def _options(words: Sequence[str]) -> dict[str, str | bool]:
    """`--time=1:00 --exclusive -p gpu` as {"time": "1:00", "exclusive": True, "partition": "gpu"}; later ones win."""
    options: dict[str, str | bool] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word in _SHORT and rest:
            options[_SHORT[word]] = rest.pop(0)
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name:
            raise LaunchError(f"{word}: write options of sbatch as --name=value")
        options[name.replace("-", "_")] = value if equals else True
    return options


def experiment(name: str, tasks: Sequence[Task], executor: run.Executor, python: str = "python") -> run.Experiment:
    """The tasks with their dependencies. Give it to `submit` or `show`.

    Raises:
        LaunchError: VENV of the site file would be in the copy of the code, which has no environment.
    """
    _check_venv(executor)
    ids: dict[str, str] = {}
    with run.Experiment(name, skip_status_at_exit=True) as result:
        for task in tasks:
            ids[task.name] = result.add(
                _script(task, executor, python),
                executor=_sized(task, executor),
                name=task.name,
                dependencies=[ids[other] for other in task.after] or None,
            )
    return result


def _check_venv(executor: run.Executor) -> None:
    if not isinstance(executor, run.SlurmExecutor) or not isinstance(executor.packager, WorkTreePackager):
        return
    venv = executor.packager.venv
    if not venv:
        return
    if isinstance(executor.tunnel, run.SSHTunnel):
        raise LaunchError(
            f"VENV in {executor.packager.site} is in the folder of the code ($MEGATRON_RL_HOME), and the jobs run from a "
            "copy of it without an environment: write the absolute path of an environment on the cluster"
        )
    if not (Path(venv) / "bin" / "python").exists():
        raise LaunchError(f"there is no {venv}/bin/python (VENV in {executor.packager.site}); make setup makes .venv")


def show(experiment: run.Experiment) -> int:
    """Prints every task's batch script (on this machine: its commands); submits nothing."""
    experiment.dryrun(log=False, delete_exp_dir=False)
    for job in experiment.jobs:
        folder = Path(job.executor.job_dir)
        for path in sorted([*folder.parent.glob(f"{job.id}_sbatch.sh"), *folder.glob("scripts/*.sh")]):
            print(f"# {path}\n{path.read_text()}")
    return 0


def submit(experiment: run.Experiment, wait: bool) -> int:
    """Starts the experiment. Slurm's jobs run on by themselves; on this machine the tasks run now.

    Returns 0, or 1 where a task that was waited for has failed.

    Raises:
        LaunchError: the login node, or its sbatch, has refused; the message has its words, and names the jobs of this
            experiment that are in the queue already.
    """
    with experiment:
        try:
            for job in experiment.jobs:
                if isinstance(job.executor, run.SlurmExecutor) and isinstance(job.executor.tunnel, run.SSHTunnel):
                    log_in(job.executor.tunnel)
                    break  # one login node for all
            experiment.run(detach=not wait, sequential=wait, tail_logs=wait)
        except UnexpectedExit as error:
            numbers = [str(job.handle).rpartition("/")[2] for job in experiment.jobs if job.handle]
            queued = f"\nin the queue already: {' '.join(numbers)} (scancel them)" if numbers else ""
            raise LaunchError(_failed(error) + queued) from None
    failed = [job.id for job in experiment.jobs if wait and str(job.status(experiment._runner)) != "SUCCEEDED"]
    for job in experiment.jobs:
        number = str(job.handle).rpartition("/")[2]
        print(f"{job.id}: " + (f"Slurm job {number}" if not wait else "failed" if job.id in failed else "done"))
    return 1 if failed else 0


def log_in(tunnel: run.SSHTunnel) -> None:
    """Connects, and sees that jobs can be submitted from there, before anything is copied.

    Raises:
        LaunchError: it cannot be reached, does not let us in, or lacks what NeMo-Run needs there.
    """
    where = f"{tunnel.user}@{tunnel.host}" + (f" (port {tunnel.port})" if tunnel.port else "")
    if tunnel.identity and not Path(tunnel.identity).is_file():
        raise LaunchError(f"--identity {tunnel.identity}: no such file")
    for program in ("ssh", "rsync"):
        if shutil.which(program) is None:
            raise LaunchError(f"NeMo-Run copies the code with rsync over ssh: install {program} on this machine")
    try:
        tunnel.connect()
    except SystemExit:  # NeMo-Run's answer, after the key, the agent's keys and a password
        key = f"the key {tunnel.identity}" if tunnel.identity else "a key of yours"
        raise LaunchError(f"{where} does not let you in: neither {key} nor a password was accepted") from None
    except (OSError, ValueError) as error:  # ValueError: a file that is no key
        raise LaunchError(f"{where} cannot be reached: {error}") from None
    folder, file = shlex.quote(tunnel.job_dir), shlex.quote(f"{tunnel.job_dir}/.writable")
    for command, remedy in (
        (f"mkdir -p {folder} && touch {file} && rm {file}", "--job-dir has to be a folder there that you may write to"),
        ("sbatch --version", "sbatch is not found by commands over ssh: give the login node a --pre-command"),
        ("rsync --version", "install rsync there: NeMo-Run copies the code with it"),
    ):
        try:
            tunnel.run(command)
        except UnexpectedExit as error:
            raise LaunchError(f"{where}: {_failed(error)}\n{remedy}") from None


def _failed(error: UnexpectedExit) -> str:
    """The error message of a command that NeMo-Run ran, without its traceback."""
    result = error.result
    return f"{result.command!r} failed ({result.exited}): {(result.stderr or result.stdout).strip()}"


def _script(task: Task, executor: run.Executor, python: str) -> run.Script:
    words = shlex.join(task.arguments)
    if not isinstance(executor, run.SlurmExecutor):
        return run.Script(inline=f'cd "$MEGATRON_RL_HOME" && exec {shlex.quote(python)} -m megatron_rl {words}\n')
    if task.whole_job:
        words += " launch.processes=null"
        if executor.ntasks_per_node == 1 and executor.env_vars["MEGATRON_RL_TASKS_PER_NODE"] != "1":
            return run.Script(
                inline='exec bash slurm/torchrun.sh "$SLURM_JOB_NUM_NODES" "$MEGATRON_RL_TASKS_PER_NODE" '
                + words
                + "\n"
            )
    return run.Script(inline=f"exec python -m megatron_rl {words}\n")


def _sized(task: Task, executor: run.Executor) -> run.Executor:
    sized = executor.clone()
    if isinstance(sized, run.SlurmExecutor):
        sized.setup_lines = _SETUP
        if task.after:  # what can never start any more leaves the queue
            sized.additional_parameters = {**(sized.additional_parameters or {}), "kill_on_invalid_dep": "yes"}
        if task.whole_job:
            sized.setup_lines += f"around_srun {shlex.join(task.arguments)}\n"
        else:
            sized.nodes = sized.ntasks_per_node = 1
            sized.setup_lines += "answer_end\n"
        sized.setup_lines += "trap - ERR # what srun ends with is said below\n"
    return sized
