"""The command `megatron-rl`. It checks the recipe, starts one process per device, and imports no torch itself."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_rl import __version__
from megatron_rl.config import Config, ConfigError, Machine, check, check_machine, load_recipe, to_yaml
from megatron_rl.config.checks import count_gpus
from megatron_rl.rewards import check_rewards
from megatron_rl.runtime.spawn import new_attempt, rank_environment, run_ranks
from megatron_rl.runtime.world import World, outer_world
from megatron_rl.tasks import check_tasks

BAD_RECIPE = 2  # exit code; also argparse's own

_COMMANDS = {
    "train": "reinforcement learning (after a warm-up by fine-tuning, where sft.steps > 0)",
    "sft": "supervised fine-tuning on demonstrations",
    "evaluate": "score the model on the recipe's held-out tasks",
}
_RESUMABLE = ("train", "sft")
_EPILOG = """\
examples:
  megatron-rl train recipes/cpu/quickstart.yaml
  megatron-rl train recipes/cpu/quickstart.yaml algorithm.preset=gdpo trainer.steps=5
  megatron-rl train recipes/cpu/quickstart.yaml --check
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit code: 0, 2 for a bad recipe, 130 after Ctrl-C, or that of a failed process."""
    args = _parse(sys.argv[1:] if arguments is None else arguments)
    world = outer_world(os.environ)
    machine = Machine(
        gpus=count_gpus(),
        world_size=None if world is None else world.size,
        local_world_size=None if world is None else world.local_size,
    )
    try:
        config = _load(args, machine)
        if args.check:
            _print_checked(config, machine)
            return 0
        check_machine(config, machine)
        resume = _resume(getattr(args, "resume", "never"))
        if args.command == "evaluate" and (Path(config.run_dir) / "checkpoints").exists():
            raise ConfigError(
                f"`run_dir` {config.run_dir} holds a training run, which an evaluation would overwrite; give it a folder of "
                "its own, for example run_dir=runs/evaluation (and model.path=<training run>/export)"
            )
    except ConfigError as error:
        if world is None or world.rank == 0:  # one message, not one per process
            print(f"megatron-rl: {error}", file=sys.stderr)
        return BAD_RECIPE
    command = [args.command, "--run-dir", config.run_dir, "--resume", resume]
    try:
        _write(Path(config.run_dir), to_yaml(config))
        if world is None:
            return _start(command, config, machine.gpus)
    except OSError as error:
        print(f"megatron-rl: cannot write to run_dir {config.run_dir}: {error.strerror}", file=sys.stderr)
        return 1
    return _join(world, args.command, config.run_dir, resume, machine.gpus)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megatron-rl",
        description="Reinforcement learning for large language models on Megatron-Core and vLLM.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        command.add_argument("recipe", metavar="RECIPE", help="YAML file")
        command.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="overrides, e.g. trainer.steps=5")
        command.add_argument("--check", action="store_true", help="check the recipe, print it resolved, start nothing")
        if name in _RESUMABLE:
            command.add_argument(
                "--resume",
                metavar="auto|PATH|never",
                default="auto",
                help="auto: the newest complete checkpoint of run_dir, if any (default); PATH: that checkpoint",
            )
    args, rest = parser.parse_known_args(arguments)
    # argparse gives up on positionals after an option: `train RECIPE --check a.b=1` leaves the override over.
    unknown = [text for text in rest if text.startswith("-") or "=" not in text]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    args.overrides += rest
    return args


def _load(args: argparse.Namespace, machine: Machine) -> Config:
    config = check(load_recipe(args.recipe, args.overrides), command=args.command, machine=machine)
    try:
        check_tasks(config.tasks)
        check_rewards(config.rewards, {*config.tasks.train, *config.tasks.eval})
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return config


def _print_checked(config: Config, machine: Machine) -> None:
    print(to_yaml(config), end="")
    try:
        check_machine(config, machine)
    except ConfigError as error:
        print(f"megatron-rl: the recipe is fine, but not for this machine: {error}", file=sys.stderr)


def _resume(mode: str) -> str:
    if mode in ("auto", "never"):
        return mode
    if not Path(mode).is_dir():
        raise ConfigError(f"--resume {mode}: no such folder; give auto, never, or the path of a checkpoint")
    return str(Path(mode).resolve())


def _write(run_dir: Path, recipe: str) -> None:
    """Writes `recipe.yaml` in one move: with torchrun every process does, and none may read another's half."""
    run_dir.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=run_dir, prefix=".recipe")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(recipe)
        os.chmod(temporary, 0o644)
        os.replace(temporary, run_dir / "recipe.yaml")
    except BaseException:
        os.unlink(temporary)
        raise


def _start(command: Sequence[str], config: Config, gpus: int) -> int:
    assert config.launch.processes is not None  # `check` has filled it in
    logs = new_attempt(Path(config.run_dir))
    on = "GPU" if gpus else "CPU"
    print(f"{config.launch.processes} {on} processes; run folder {config.run_dir}, logs in {logs}", flush=True)
    outcome = run_ranks(
        [sys.executable, "-m", "megatron_rl.trainer.main", *command],
        config.launch.processes,
        logs,
        rank_environment(gpus),
    )
    if outcome.message:
        print(f"megatron-rl: {outcome.message}", file=sys.stderr)
    return outcome.code


def _join(world: World, command: str, run_dir: str, resume: str, gpus: int) -> int:
    """This process is itself a rank: of torchrun, or of srun."""
    os.environ.update(rank_environment(gpus))
    os.environ.update(world.variables)
    from megatron_rl.trainer.main import main as run_rank

    return run_rank(command, run_dir, resume) or 0
