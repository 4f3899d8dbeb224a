"""The main program of a rank, started by `megatron-rl` (or torchrun, or srun) with the world in its environment."""

from __future__ import annotations

import gc
import hashlib
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.runtime import exit_codes, streams
from megatron_rl.runtime.heartbeat import HEARTBEAT
from megatron_rl.runtime.rank_job import RankJob
from megatron_rl.runtime.stop import StopFlag, StopRequested
from megatron_rl.trainer.rank.attempt import Attempt

if TYPE_CHECKING:
    from megatron_rl.config import Config
    from megatron_rl.runtime.distributed import ProcessGrid


def main(job: RankJob) -> int:
    """Runs a command on this rank; returns the exit code."""
    stop = StopFlag()  # before anything that takes time
    quiet_known_warnings()
    gc.disable()  # a million objects are imported, and stay: to search them for garbage again and again takes seconds
    # Imported here: the launcher sets the environment that torch and vLLM read on import.
    import torch

    from megatron_rl.config import load_recipe
    from megatron_rl.runtime import distributed
    from megatron_rl.seams import torch_compile
    from megatron_rl.trainer.evaluate import evaluate_only
    from megatron_rl.trainer.loop import train
    from megatron_rl.trainer.reward_model import reward_model
    from megatron_rl.trainer.run import build_run
    from megatron_rl.trainer.sft import sft

    torch_compile.leave_out()
    config = load_recipe(job.recipe)
    torch.manual_seed(config.seed)
    attempt = Attempt(config, Path(job.run_dir))
    code = exit_codes.OK
    try:
        if not within_limits(config):
            return exit_codes.PREFLIGHT
        grid = attempt.join()
        agree(config, grid)
        if not _fit(config, grid):
            return exit_codes.PREFLIGHT
        if job.command == "evaluate":
            attempt.end_at_once_on(stop)
        attempt.run = build_run(config, grid, Path(job.run_dir), job.command, stop, attempt.ownership)
        gc.freeze()
        gc.enable()
        commands = {"train": train, "sft": sft, "reward-model": reward_model, "evaluate": evaluate_only}
        commands[job.command](attempt.run, job.resume)
        attempt.run.report.summary()
        HEARTBEAT.finish()
    except StopRequested as request:
        code = attempt.stopped(request)
    except Exception as error:
        return attempt.failed(error)
    finally:
        stop.ignore()
        gc.disable()  # vLLM's engine undoes `freeze` as it ends: all that was imported would be searched again, three times
        attempt.close()
        gc.freeze()  # also for Python's last search
    # All end together: srun kills the ranks that are left at once after an exit code other than 0, NeMo-Run's after a minute.
    grid.barrier()
    distributed.shutdown()
    return code


def agree(config: Config, grid: ProcessGrid) -> None:
    """Every rank has resolved the command line for itself, and a recipe that is not shared may differ between nodes.

    Raises:
        ValueError: on every rank, with the keys in which another rank's recipe is not rank 0's.
    """
    from megatron_rl.config import as_tree, changes, to_yaml

    digests = grid.all_gather(hashlib.blake2b(to_yaml(config).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    recipes = grid.all_gather(as_tree(config))
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    shown = ", ".join(f"{key} {before!r} and {after!r}" for key, before, after in changes(recipes[0], recipes[rank]))
    raise ValueError(
        f"ranks 0 and {rank} were started with different recipes: {shown}; give all of them the same files and overrides"
    )


def within_limits(config: Config) -> bool:
    """The part of the pre-flight that cannot wait until the ranks have found each other."""
    from megatron_rl.preflight.local import limits_in_the_way

    problem = None if config.launch.preflight == "off" else limits_in_the_way(config)
    if problem is not None:
        print(f"megatron-rl: {problem}", file=sys.stderr, flush=True)
    return problem is None


def _fit(config: Config, grid: ProcessGrid) -> bool:
    """Pre-flight, as far as the recipe wants it; what it finds is on the terminal."""
    from megatron_rl.preflight import preflight
    from megatron_rl.preflight.across_ranks import write_report

    if config.launch.preflight == "off":
        return True
    try:
        report = preflight(config, grid, full=config.launch.preflight == "full")
    except ConnectionError as error:
        print(f"megatron-rl: {error}", file=sys.stderr, flush=True)
        return False
    write_report(report, config, grid.rank)
    if grid.is_main:
        print(
            f"megatron-rl: {report.text()}" if report.failed else report.text(),
            file=sys.stderr if report.failed else None,
        )
    return not report.failed


def quiet_known_warnings() -> None:
    """Warnings that say nothing to a user of this package: Megatron-Core's about optional parts and torch's deprecations."""
    warnings.filterwarnings("ignore", message="Apex is not installed")
    warnings.filterwarnings("ignore", message="When using async grad allreduce it is recommended")
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf Tensor")
    warnings.filterwarnings("ignore", message="`torch.distributed.reduce_op` is deprecated")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\..*")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch\.distributed|megatron\.core)\..*")


if __name__ == "__main__":
    job = RankJob.parse()
    streams.accept_any_text()
    sys.exit(main(job))
