"""`launch`: runs, chains and sweeps through NeMo-Run, on this machine or on a Slurm cluster."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

import megatron_rl
from megatron_rl import launch
from megatron_rl.launch import job_plan
from megatron_rl.launch.package import name_in

if TYPE_CHECKING:
    from nemo_run import SSHTunnel

_INSTALL = """\
`megatron-rl launch` needs NeMo-Run, in an environment of its own (its pins contradict vLLM's; it needs no torch):
    make launch-setup
    .venv-launch/bin/megatron-rl launch ...
Without it, slurm/submit.sh submits the same jobs with nothing but sbatch (docs/slurm.md)."""


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file inside the folder that is packaged")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[], help="overrides, e.g. trainer.steps=5")
    parser.add_argument("--executor", choices=("slurm", "local"), required=True)
    parser.add_argument("--command", choices=("train", "sft", "reward-model"), dest="what", help="default: train")
    parser.add_argument("--chain", action="store_true", help="convert, train, evaluate and export, one after the other")
    parser.add_argument("--sweep", type=Path, metavar="FILE", help="a training run per line of overrides in FILE")
    parser.add_argument("--name", help="of the experiment (default: the recipe's)")
    parser.add_argument("--dry-run", action="store_true", help="print the batch scripts, submit nothing")
    local = parser.add_argument_group("local")
    local.add_argument("--python", help="interpreter that runs the tasks (default: .venv/bin/python)")
    slurm = parser.add_argument_group("slurm")
    slurm.add_argument("--nodes", type=int, metavar="N", help="default: 1")
    slurm.add_argument("--gpus-per-node", type=int, metavar="G", help="processes per node (default: the site's)")
    slurm.add_argument("--site", type=Path, metavar="FILE", help="the site's settings (default: slurm/site.sh)")
    slurm.add_argument(
        "--sbatch", action="append", default=[], metavar="--NAME=VALUE", help="an option of sbatch; repeat"
    )
    slurm.add_argument(
        "--job-dir", metavar="DIR", help="for code and output; shared by all nodes (default: ~/.nemo_run)"
    )
    slurm.add_argument("--host", help="login node, reached by SSH; left out, this machine is one")
    slurm.add_argument("--user", help="on the login node")
    slurm.add_argument("--port", type=int, help="of the login node's SSH server (default: 22, or ~/.ssh/config's)")
    slurm.add_argument("--identity", metavar="FILE", help="SSH key")
    slurm.add_argument(
        "--pre-command", metavar="COMMAND", help="on the login node, before every command there: 'module load slurm'"
    )


def run(args: argparse.Namespace) -> int:
    """Returns 0; what is wrong before anything was submitted is a ConfigError."""
    _check_options(args)
    if importlib.util.find_spec("nemo_run") is None:
        raise launch.LaunchError(_INSTALL)
    return _launch(args, Path(megatron_rl.__file__).parents[1])


def _check_options(args: argparse.Namespace) -> None:
    """Refuses what contradicts, and what would have no effect."""
    if args.chain and args.sweep:
        raise launch.LaunchError("--chain and --sweep: one or the other")
    for needed, is_used, options in (
        ("--executor slurm", args.executor == "slurm", ("nodes", "gpus_per_node", "site", "sbatch", "host")),
        ("--executor local", args.executor == "local", ("python",)),
        ("--host", args.host is not None, ("user", "port", "identity", "pre_command")),
        ("a single run", not (args.chain or args.sweep), ("what",)),
    ):
        for option in options:
            if not is_used and getattr(args, option):
                name = "command" if option == "what" else option.replace("_", "-")
                raise launch.LaunchError(f"--{name} has no effect here: it needs {needed}")
    for name in ("nodes", "gpus_per_node"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise launch.LaunchError(f"--{name.replace('_', '-')} must be at least 1")
    if args.host and not (args.user and args.job_dir):
        raise launch.LaunchError("--host needs --user, and --job-dir with a folder on the cluster")


def _launch(args: argparse.Namespace, root: Path) -> int:
    for option in ("site", "sweep", "identity"):  # files of the folder that the command was given in
        if getattr(args, option):
            setattr(args, option, Path(getattr(args, option)).expanduser().absolute())
    if args.job_dir and not args.host:
        os.environ["NEMORUN_HOME"] = str(Path(args.job_dir).absolute())  # read when NeMo-Run is imported
    site = launch.read_site(root, args.site) if args.executor == "slurm" else None
    nodes = args.nodes or 1
    processes = nodes * (args.gpus_per_node or site.tasks_per_node) if site else None
    name = name_in(root, Path(args.recipe), packaged=site is not None)
    os.chdir(root)
    tasks = _tasks(args, name, processes, root)
    from megatron_rl.launch import nemo

    if site is None:
        executor: nemo.run.Executor = nemo.local(root)
    else:
        executor = nemo.slurm(site, root, nodes, args.gpus_per_node, args.sbatch, _tunnel(args))
    python = args.python or str(root / ".venv" / "bin" / "python")
    experiment = nemo.experiment(args.name or Path(name).stem, tasks, executor, python)
    if args.dry_run:
        return nemo.show(experiment)
    return nemo.submit(experiment, wait=args.executor == "local")


def _tasks(args: argparse.Namespace, recipe: str, processes: int | None, root: Path) -> list[launch.Task]:
    remote = args.host is not None
    if remote:
        root = Path(args.job_dir)  # where a relative run_dir is, there
    if args.chain:
        return launch.chain(recipe, args.overrides, processes, root, remote)
    if args.sweep:
        return launch.sweep(recipe, job_plan.read_sweep(args.sweep), args.overrides, processes, root, remote)
    return [launch.one(args.what or "train", recipe, args.overrides, processes, root, remote)]


def _tunnel(args: argparse.Namespace) -> SSHTunnel | None:
    if args.host is None:
        return None
    import nemo_run

    return nemo_run.SSHTunnel(
        host=args.host,
        user=args.user,
        port=args.port,
        job_dir=args.job_dir,
        identity=str(args.identity) if args.identity else None,
        pre_command=args.pre_command,
    )
