"""The plan of a launch: commands of `megatron-rl`, their dependencies and sizes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.base.messages import errors_named
from megatron_rl.config import Config, ConfigError, Machine, load_recipe
from megatron_rl.config.inactive import check_overrides
from megatron_rl.preflight.recipe import check_recipe

_LONGEST_NAME = 255  # bytes of a folder's
_MISSING = "does not exist|[Nn]o such file"  # in a problem with a path


class LaunchError(ConfigError):
    """A launch that cannot work; the message says what to change."""


@dataclass(frozen=True)
class Task:
    """One job: `megatron-rl <arguments>`. Tasks named in `after` have to end well before it starts."""

    name: str
    arguments: tuple[str, ...]
    after: tuple[str, ...] = ()
    whole_job: bool = True  # False: one process on one node, whatever the launch asks for

    @property
    def command(self) -> str:
        return self.arguments[0]


def one(
    command: str, recipe: str, overrides: Sequence[str], processes: int | None, root: Path, remote: bool = False
) -> Task:
    """A single run, with an absolute run folder."""
    config = resolve(command, recipe, overrides, processes, remote)
    words = _replaced(overrides, f"run_dir={_run_dir(config, root)}")
    return Task(_name(command, recipe), (command, recipe, *words))


def sweep(
    recipe: str,
    lines: Sequence[str],
    overrides: Sequence[str],
    processes: int | None,
    root: Path,
    remote: bool = False,
    only: int | None = None,
) -> list[Task]:
    """One training run per line of overrides, or that of line `only` (from 0); each has a run folder named after its line.

    Raises:
        ConfigError: naming the line that is no valid recipe; nothing is launched then.
    """
    tasks = []
    for number, line in enumerate(lines):
        if only not in (None, number):
            continue
        # Of shlex, or a ConfigError.
        with errors_named(f"line {number + 1} of the sweep ({line})", as_error=ConfigError):
            words = [*overrides, *shlex.split(line)]
            config = resolve("train", recipe, words, processes, remote)
        name = f"{number:03d}-{re.sub(r'[^A-Za-z0-9=.,_]+', '_', line)}"[:_LONGEST_NAME]
        words = _replaced(words, f"run_dir={_run_dir(config, root) / name}")
        tasks.append(Task(f"{_name('train', recipe)}-{number:03d}", ("train", recipe, *words)))
    if not tasks:
        raise LaunchError("the sweep has no line; give it one line of overrides per run")
    return tasks


def chain(recipe: str, overrides: Sequence[str], processes: int | None, root: Path, remote: bool = False) -> list[Task]:
    """Convert, train, evaluate, export: each starts once its predecessor has succeeded.

    The Hugging Face folder `model.path` becomes a Megatron checkpoint cut for the recipe's layout; training starts from it;
    the last step's checkpoint is evaluated on the recipe's held-out tasks, and becomes a verified Hugging Face folder.
    """
    config = resolve("train", recipe, overrides, processes, remote)
    path, run_dir, parallel = config.model.path, _run_dir(config, root), config.actor.parallel
    if path is None:
        raise LaunchError("a chain starts with a model to convert: set model.path to a Hugging Face folder")
    if not config.checkpoint.every:
        raise LaunchError("a chain evaluates and exports the last checkpoint: set checkpoint.every to some steps")
    if not config.tasks.eval:
        raise LaunchError("a chain evaluates: the recipe needs tasks.eval (or launch the steps one by one)")
    converted = run_dir / "megatron"
    last = run_dir / "checkpoints" / f"step_{config.trainer.steps}"
    sizes = ("tensor", "pipeline", "expert", "expert_tensor")
    layout = [f"--{name.replace('_', '-')}={getattr(parallel, name)}" for name in sizes]
    name = _name("", recipe)
    return [
        Task(
            f"convert{name}",
            ("convert", "to-megatron", "--hf", path, "--megatron", str(converted), *layout, "--verify"),
            whole_job=False,
        ),
        Task(
            f"train{name}",
            ("train", recipe, *_replaced(overrides, f"run_dir={run_dir}", f"model.path={converted}")),
            after=(f"convert{name}",),
        ),
        Task(
            f"evaluate{name}",
            ("evaluate", recipe, "--model", str(last), *_replaced(overrides, f"run_dir={run_dir / 'evaluation'}")),
            after=(f"train{name}",),
        ),
        Task(
            f"export{name}",
            ("convert", "to-hf", "--megatron", str(last), "--hf", str(run_dir / "hf"), "--verify"),
            after=(f"evaluate{name}",),
            whole_job=False,
        ),
    ]


def resolve(command: str, recipe: str, overrides: Sequence[str], processes: int | None, remote: bool = False) -> Config:
    """The checked recipe, for this number of processes where it is known.

    With `remote`, folders and files that are not here are left to the job, which checks the recipe again before it starts.

    Raises:
        ConfigError: one line per problem.
    """
    check_overrides(overrides, command)
    config = load_recipe(recipe, [*overrides, "launch.processes=null"])
    try:
        return check_recipe(config, command, Machine(0, processes, processes), recipe=recipe)
    except ConfigError as error:
        elsewhere = all(re.search(_MISSING, line) for line in str(error).splitlines())
        if remote and elsewhere:
            return config
        raise


def read_sweep(path: Path) -> list[str]:
    """The lines of a sweep file that count. Raises LaunchError: it cannot be read."""
    with errors_named(f"the sweep {path} cannot be read", OSError, UnicodeDecodeError, as_error=LaunchError):
        text = path.read_text(encoding="utf-8")
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def _run_dir(config: Config, root: Path) -> Path:
    return root / config.run_dir  # an absolute run_dir stays what it is


def _replaced(overrides: Sequence[str], *own: str) -> list[str]:
    """The overrides, with `own` in place of those of the same keys."""
    keys = {override.partition("=")[0] for override in own}
    return [*(override for override in overrides if override.partition("=")[0] not in keys), *own]


def _name(command: str, recipe: str) -> str:
    return f"{command}-{re.sub(r'[^A-Za-z0-9_.]+', '-', Path(recipe).stem)}"
