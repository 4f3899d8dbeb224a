"""`train`, `sft`, `reward-model`: checks the recipe and starts one process per device (or joins another launcher's world)."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron_rl.base.messages import count
from megatron_rl.commands.packages import require_torch
from megatron_rl.config import Config, ConfigError, Machine, check_machine, load_recipe, to_yaml
from megatron_rl.config.actor_checks import parameters_in_fp8
from megatron_rl.config.checks import count_gpus
from megatron_rl.config.inactive import check_overrides
from megatron_rl.preflight.recipe import check_recipe
from megatron_rl.runtime import disk, exit_codes, nvml, owner, stop, streams
from megatron_rl.runtime.attempts import (
    ATTEMPT,
    REFUSED,
    World,
    new_attempt,
    outer_world,
    rank_environment,
    shared_attempt,
)
from megatron_rl.runtime.spawn import Graces, RanksOutcome, run_rank, run_ranks
from megatron_rl.tasks import asks_hub

IMPORTS = "megatron_rl.trainer.rank.imports"  # what the process does that forks the ranks


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="overrides, e.g. trainer.steps=5")
    add_check(parser)
    parser.add_argument(
        "--resume",
        metavar="auto|PATH|never",
        default="auto",
        help="auto: the newest complete checkpoint of run_dir, if any (default); PATH: that checkpoint",
    )


def add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="check the recipe, print it resolved, start nothing")
    parser.add_argument(
        "--processes",
        metavar="N",
        type=_positive,
        help="with --check: for N processes on other machines, not for this one",
    )


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Returns 0, 2 for a bad recipe, 130 after Ctrl-C, or the exit code of a failed process."""
    machine, world = machine_here()
    machine = machine_asked_for(args, machine)
    if unread := list(check_overrides(args.overrides, args.command)):
        raise ConfigError("\n".join(unread))
    config = check_recipe(load_recipe(args.recipe, args.overrides), args.command, machine, recipe=args.recipe)
    if args.check:
        return print_checked(config, machine if args.processes is None else None, args.command)
    check_machine(config, machine, args.command)
    return start_ranks(args.command, config, _resume(args.resume), machine, world)


def machine_asked_for(args: argparse.Namespace, machine: Machine) -> Machine:
    """The machine that the recipe is checked for: this one, or with --processes N whatever has N processes.

    Those are another launcher's, so `args.overrides` then leave out the recipe's `launch.processes`, as the batch scripts do.

    Raises:
        ConfigError: --processes without --check.
    """
    if args.processes is None:
        return machine
    if not args.check:
        raise ConfigError(
            f"--processes {args.processes} needs --check; launch.processes={args.processes} starts that many here"
        )
    args.overrides = [*args.overrides, "launch.processes=null"]
    return Machine(world_size=args.processes)


def machine_here() -> tuple[Machine, World | None]:
    """This machine, and the world that torchrun or srun has made, if this process is one of its."""
    world = outer_world(os.environ)
    machine = Machine(
        gpus=count_gpus(),
        world_size=None if world is None else world.size,
        local_world_size=None if world is None else world.local_size,
    )
    return machine, world


def start_ranks(name: str, config: Config, resume: str, machine: Machine, world: World | None) -> int:
    """Takes the run folder, writes the recipe there, and runs the ranks, or the one of them that this process stands for.

    Raises ConfigError where there is no torch, or the folder cannot be had.

    Where several processes stand for ranks, rank 0's does so for all; the others write nothing outside the attempt's folder.
    """
    require_torch(name)
    run_dir = Path(config.run_dir)
    handle = _unnamed_file(to_yaml(config))
    command = [name, "--run-dir", config.run_dir, "--recipe", f"/proc/self/fd/{handle}", "--resume", resume]
    environment, ownership = rank_environment(machine.gpus), None
    if asks_hub(config.tasks) and "HF_HUB_OFFLINE" not in os.environ:
        environment["HF_HUB_OFFLINE"] = "0"  # else `rollout.environment` switches the hub off, before tasks are loaded
    environment |= _scales(config, machine)
    with contextlib.ExitStack() as stack:
        if world is None or world.rank == 0:
            ownership = stack.enter_context(hold_run_folder(config))
            environment |= ownership.variables()
        try:
            if world is None:
                return _start(command, config, machine.gpus, environment, handle)
            return _join(world, command, config, environment, handle)
        except TimeoutError as error:
            why = str(error.strerror)
        except OSError as error:
            gone = not run_dir.is_dir() if ownership is None else ownership.is_gone()
            why = owner.gone(run_dir) if gone else f"cannot write to run_dir {run_dir}: {error.strerror}"
    print(f"megatron-rl: {why}", file=sys.stderr)
    return exit_codes.FAILED


def _scales(config: Config, machine: Machine) -> dict[str, str]:
    """Transformer Engine reads how it rounds scales when it is imported, which is before forked ranks join their world
    (`runtime.distributed.initialize` says the same for others). What the user has set wins."""
    fp8 = config.actor.fp8
    if fp8 is None or fp8.recipe != "blockwise" or parameters_in_fp8(config) or nvml.FP32_SCALES in os.environ:
        return {}
    return {nvml.FP32_SCALES: "1"} if machine.gpus and nvml.capability()[0] == 9 else {}


@contextlib.contextmanager
def hold_run_folder(config: Config) -> Iterator[owner.Ownership]:
    """The run folder is this command's while the context is open, with the recipe in it.

    Raises:
        ConfigError: the folder is another run's, or cannot be written. Nothing in it was changed; an attempt that a batch
            script has made there says that it was refused.
    """
    run_dir = Path(config.run_dir)
    ownership = owner.Ownership(run_dir)
    try:
        former = ownership.take()
        disk.replace(run_dir / "recipe.yaml", to_yaml(config))
    except owner.OwnedError as error:
        if attempt := os.environ.get(ATTEMPT):
            with contextlib.suppress(OSError):  # a full disk, say, is not why the command ends
                disk.replace(Path(attempt) / REFUSED, f"{error}\n")
        raise ConfigError(str(error)) from None
    except OSError as error:
        ownership.release()
        refusal = ConfigError(f"cannot write to run_dir {run_dir}: {error.strerror}")
        refusal.code = exit_codes.FAILED
        raise refusal from None
    try:
        if former is not None:
            streams.say(f"the run folder was left by {former}, which is gone", sys.stdout)
        yield ownership
    finally:
        ownership.release()


def _unnamed_file(text: str) -> int:
    """A file in memory that processes inherit: a rank reads the recipe that was checked for it, whatever happens on disk."""
    handle = os.memfd_create("recipe.yaml", 0)
    with open(handle, "w", encoding="utf-8", closefd=False) as file:
        file.write(text)
    return handle


def print_checked(config: Config, machine: Machine | None, command: str) -> int:
    """Prints the recipe. It must fit the number of processes where that is given, for example by a batch script.
    `machine`: None where the recipe is to run elsewhere.
    """
    print(to_yaml(config), end="")
    if machine is None:
        return exit_codes.OK
    try:
        check_machine(config, machine, command)
    except ConfigError as error:
        print(f"megatron-rl: the recipe is fine, but not for this machine: {error}", file=sys.stderr)
        return exit_codes.OK if machine.world_size is None else exit_codes.BAD_INPUT
    return exit_codes.OK


def _resume(mode: str) -> str:
    if mode in ("auto", "never"):
        return mode
    if not Path(mode).is_dir():
        raise ConfigError(f"--resume {mode}: no such folder; give auto, never, or the path of a checkpoint")
    return str(Path(mode).resolve())


def _start(command: Sequence[str], config: Config, gpus: int, environment: Mapping[str, str], recipe: int) -> int:
    assert config.launch.processes is not None  # `check` has filled it in
    given = os.environ.get(ATTEMPT)  # a batch script's, of a job with one task
    logs = Path(given) if given else new_attempt(Path(config.run_dir))
    on = "GPU" if gpus else "CPU"
    streams.say(
        f"{count(config.launch.processes, f'{on} process')}; run folder {config.run_dir}, logs in {logs}", sys.stdout
    )
    outcome = run_ranks(
        _rank(command),
        config.launch.processes,
        logs,
        environment,
        graces(os.environ),
        files=(recipe,),
        imports=IMPORTS,
    )
    return _report(outcome)


def graces(environment: Mapping[str, str]) -> Graces:
    """Grace periods of the ranks; in a Slurm step none, since Slurm itself kills late processes (GraceTime, KillWait)."""
    return Graces(stop=math.inf) if "SLURM_STEP_ID" in environment else Graces()


def _join(world: World, command: Sequence[str], config: Config, environment: Mapping[str, str], recipe: int) -> int:
    """This process stands for a rank of srun's or torchrun's world: it runs the rank, in the attempt's log folder."""
    logs = shared_attempt(Path(config.run_dir), os.environ, world.rank, 60 * config.launch.timeout_minutes)
    if logs is not None:
        return _report(run_rank(_rank(command), world.variables, logs, environment, files=(recipe,)))
    os.environ.update(environment)
    os.environ.update(world.variables)
    stop.hold_back()  # until the rank has its handlers
    os.execv(sys.executable, _rank(command))


def _rank(command: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "megatron_rl.trainer.rank.main", *command]


def _report(outcome: RanksOutcome) -> int:
    if outcome.message:
        streams.say(f"megatron-rl: {outcome.message}")
    return outcome.code
