"""The ranks of a checked recipe: one process per device of this machine, or the one of another launcher's world that this
process stands for."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.base.messages import count
from megatron_rl.config import Config, ConfigError, Machine, to_yaml
from megatron_rl.config.actor_checks import parameters_in_fp8
from megatron_rl.config.machine import count_gpus
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
from megatron_rl.runtime.rank_job import RankJob
from megatron_rl.runtime.spawn import Graces, run_rank, run_ranks
from megatron_rl.tasks import asks_hub


def machine_here() -> tuple[Machine, World | None]:
    """This machine, and the world that torchrun or srun has made, if this process is one of its."""
    world = outer_world(os.environ)
    machine = Machine(
        gpus=count_gpus(),
        world_size=None if world is None else world.size,
        local_world_size=None if world is None else world.local_size,
    )
    return machine, world


@dataclass(frozen=True)
class RankLaunch:
    """A checked recipe on its way to ranks.

    Attributes:
        command: train, sft, reward-model or evaluate.
        resume: `auto`, `never`, or a checkpoint's folder.
        machine: this one; `world`: another launcher's, if this process is one of its.
    """

    command: str
    config: Config
    resume: str
    machine: Machine
    world: World | None

    def start(self) -> int:
        """Takes the run folder, writes the recipe there, and runs the ranks, or the one of them that this process stands for;
        the exit code. Where several processes stand for ranks, rank 0's does so for all; the others write nothing outside the
        attempt's folder.

        Raises:
            ConfigError: the folder cannot be had.
        """
        config, run_dir = self.config, Path(self.config.run_dir)
        recipe = _unnamed_file(to_yaml(config))
        job = RankJob(self.command, config.run_dir, f"/proc/self/fd/{recipe}", self.resume)
        environment, ownership = rank_environment(self.machine.gpus), None
        if asks_hub(config.tasks) and "HF_HUB_OFFLINE" not in os.environ:
            environment["HF_HUB_OFFLINE"] = (
                "0"  # else `rollout.environment` switches the hub off, before tasks are loaded
            )
        environment |= fp8_scales(config, self.machine)
        with contextlib.ExitStack() as stack:
            if self.world is None or self.world.rank == 0:
                ownership = stack.enter_context(hold_run_folder(config))
                environment |= ownership.variables()
            try:
                start = self._start if self.world is None else self._join
                return start(job, environment, recipe)
            except TimeoutError as error:
                why = str(error.strerror)
            except OSError as error:
                gone = not run_dir.is_dir() if ownership is None else ownership.is_gone()
                why = owner.gone(run_dir) if gone else f"cannot write to run_dir {run_dir}: {error.strerror}"
        print(f"megatron-rl: {why}", file=sys.stderr)
        return exit_codes.FAILED

    def _start(self, job: RankJob, environment: Mapping[str, str], recipe: int) -> int:
        processes = self.config.launch.processes
        assert processes is not None  # `check` has filled it in
        batch = os.environ.get(ATTEMPT)  # a batch script's, of a job with one task
        logs = Path(batch) if batch else new_attempt(Path(job.run_dir))
        on = "GPU" if self.machine.gpus else "CPU"
        streams.say(f"{count(processes, f'{on} process')}; run folder {job.run_dir}, logs in {logs}", sys.stdout)
        graces = graces_in(os.environ)
        imports = imports_of(self.config)
        outcome = run_ranks(job.words(), processes, logs, environment, graces, files=(recipe,), imports=imports)
        return outcome.said()

    def _join(self, job: RankJob, environment: Mapping[str, str], recipe: int) -> int:
        """This process stands for a rank of srun's or torchrun's world: it runs the rank, in the attempt's log folder."""
        assert self.world is not None
        patience = 60 * self.config.launch.timeout_minutes
        logs = shared_attempt(Path(job.run_dir), os.environ, self.world.rank, patience)
        if logs is not None:
            return run_rank(job.words(), self.world.variables, logs, environment, files=(recipe,)).said()
        os.environ.update(environment)
        os.environ.update(self.world.variables)
        stop.hold_back()  # until the rank has its handlers
        os.execv(sys.executable, job.words())


def imports_of(config: Config) -> str:
    """The module with what the process does that forks the ranks of a recipe."""
    tasks = (*config.tasks.train.values(), *config.tasks.eval.values())
    with_gym = any(task.source == "reasoning_gym" for task in tasks)
    return f"megatron_rl.trainer.rank.imports{'_with_gym' if with_gym else ''}"


def fp8_scales(config: Config, machine: Machine) -> dict[str, str]:
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


def graces_in(environment: Mapping[str, str]) -> Graces:
    """Grace periods of the ranks; in a Slurm step none, since Slurm itself kills late processes (GraceTime, KillWait)."""
    return Graces(stop=math.inf) if "SLURM_STEP_ID" in environment else Graces()
