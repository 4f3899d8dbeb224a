"""For NeMo-Run's command line: executors and experiments that `nemo megatron_rl ...` finds by itself.

    nemo megatron_rl train recipe=recipes/my.yaml overrides='trainer.steps=200' run.executor=site run.executor.nodes=4
    nemo megatron_rl chain recipe=recipes/my.yaml run.executor=site run.executor.nodes=4
    nemo megatron_rl sweep recipe=recipes/my.yaml file=sweep.txt run.executor=site

Found through the entry point `nemo_run.cli` in pyproject.toml. `run.executor.<field>` sets any field of the executor;
`--dryrun`, `--name` and `--yes` are NeMo-Run's.
"""

# No `from __future__ import annotations`: NeMo-Run reads the annotations themselves.

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import nemo_run as run

import megatron_rl
from megatron_rl.base.shipped import find_recipe
from megatron_rl.launch import job_plan, nemo
from megatron_rl.launch.job_plan import LaunchError, Task
from megatron_rl.launch.package import name_in
from megatron_rl.launch.site import read_site

NAMESPACE = "megatron_rl"
ROOT = Path(megatron_rl.__file__).parents[1]
_COMMANDS = ("train", "sft", "reward_model", "chain", "sweep")


@run.cli.factory(name="site")
def site() -> run.Config[run.SlurmExecutor]:
    """The cluster of slurm/site.sh (or of $MEGATRON_RL_SITE), from a login node."""
    path = os.environ.get("MEGATRON_RL_SITE")
    return nemo.slurm(read_site(ROOT, Path(path) if path else None), ROOT).to_config()


@run.cli.factory(name="here")
def here() -> run.Config[run.LocalExecutor]:
    """This machine, with the work tree's .venv."""
    return nemo.local(ROOT).to_config()


def _entrypoint(command: str, about: str) -> None:
    """Registers a command that is one run."""

    def start(ctx: run.cli.RunContext, recipe: str, overrides: str = "") -> None:
        what = _Launch(ctx, recipe, overrides)
        what.start([job_plan.one(command, *what.arguments)])

    start.__name__ = start.__qualname__ = command.replace("-", "_")
    start.__doc__ = about
    run.cli.entrypoint(namespace=NAMESPACE, type="experiment")(start)


_entrypoint(
    "train", "A training run: `recipe`, a YAML file in the work tree; `overrides`, key=value, separated by spaces."
)
_entrypoint("sft", "Supervised fine-tuning: arguments as for `train`.")
_entrypoint("reward-model", "A reward model from preference pairs: arguments as for `train`.")


@run.cli.entrypoint(namespace=NAMESPACE, type="experiment")
def chain(ctx: run.cli.RunContext, recipe: str, overrides: str = "") -> None:
    """Convert, train, evaluate and export, in this order: arguments as for `train`."""
    what = _Launch(ctx, recipe, overrides)
    what.start(job_plan.chain(*what.arguments))


@run.cli.entrypoint(namespace=NAMESPACE, type="experiment")
def sweep(ctx: run.cli.RunContext, recipe: str, file: str, overrides: str = "") -> None:
    """A training run per line of `file`: the other arguments as for `train`."""
    lines = job_plan.read_sweep(Path(file))
    what = _Launch(ctx, recipe, overrides)
    name, words, processes, root, remote = what.arguments
    what.start(job_plan.sweep(name, lines, words, processes, root, remote))


class _Launch:
    """NeMo-Run's command line as arguments for the functions of `job_plan`."""

    def __init__(self, ctx: run.cli.RunContext, recipe: str, overrides: str) -> None:
        if not isinstance(ctx.executor, run.SlurmExecutor | run.LocalExecutor):
            raise LaunchError(f"run.executor={ctx.executor}: name one, run.executor=site or run.executor=here")
        if ctx.direct or ctx.tail_logs:
            raise LaunchError("--direct and --tail-logs do not apply here: the ranks are processes of their own")
        self.ctx, self.executor = ctx, ctx.executor
        on_slurm = isinstance(self.executor, run.SlurmExecutor)
        remote = on_slurm and isinstance(self.executor.tunnel, run.SSHTunnel)
        processes = None
        if on_slurm:
            processes = self.executor.nodes * int(self.executor.env_vars["MEGATRON_RL_TASKS_PER_NODE"])
        self.name = name_in(ROOT, find_recipe(Path(recipe)), packaged=on_slurm)
        os.chdir(ROOT)
        run_root = Path(self.executor.tunnel.job_dir) if remote else ROOT
        self.arguments = (self.name, shlex.split(overrides), processes, run_root, remote)

    def start(self, tasks: Sequence[Task]) -> None:
        title = Path(self.name).stem if self.ctx.name in _COMMANDS else self.ctx.name  # --name
        experiment = nemo.experiment(title, tasks, self.executor, str(ROOT / ".venv" / "bin" / "python"))
        if self.ctx.dryrun:
            nemo.show(experiment)
        elif nemo.submit(experiment, wait=isinstance(self.executor, run.LocalExecutor)):
            raise LaunchError("a task has failed")
