"""A rank at work, once its environment is set: the recipe is loaded, the ranks meet, and the command begins."""

from __future__ import annotations

import functools
import gc
import hashlib
import sys
from pathlib import Path

import torch

from megatron_rl.config import Config, as_tree, changes, load_recipe, to_yaml
from megatron_rl.preflight.across_ranks import preflight, write_report
from megatron_rl.preflight.local import limits_in_the_way
from megatron_rl.runtime import distributed, exit_codes, leaving
from megatron_rl.runtime.distributed import ProcessGrid
from megatron_rl.runtime.heartbeat import HEARTBEAT
from megatron_rl.runtime.rank_job import RankJob
from megatron_rl.runtime.stop import StopFlag, StopRequested
from megatron_rl.trainer.evaluate import evaluate_only
from megatron_rl.trainer.generator import generate_ahead
from megatron_rl.trainer.loop import train
from megatron_rl.trainer.rank.attempt import Attempt
from megatron_rl.trainer.reward_model import reward_model
from megatron_rl.trainer.run import build_generator, build_run
from megatron_rl.trainer.sft import sft


def run_rank(job: RankJob, stop: StopFlag) -> int:
    """Runs a command on this rank, with signals noted from now on; returns the exit code."""
    config = load_recipe(job.recipe)
    torch.manual_seed(config.seed)
    attempt = Attempt(config, Path(job.run_dir))
    code = exit_codes.OK
    try:
        if not within_limits(config):
            return exit_codes.PREFLIGHT
        grid = attempt.join()
        agree(config, grid.everyone)
        if not _fit(config, grid):
            return exit_codes.PREFLIGHT
        if job.command == "evaluate":
            attempt.end_at_once_on(stop)
        commands = {"train": train, "sft": sft, "reward-model": reward_model, "evaluate": evaluate_only}
        if grid.generates_only:
            attempt.run = generator = build_generator(config, grid, Path(job.run_dir), stop)
            work = functools.partial(generate_ahead, generator)
        else:
            attempt.run = run = build_run(config, grid, Path(job.run_dir), job.command, stop, attempt.ownership)
            work = functools.partial(commands[job.command], run, job.resume)
        leaving.freeze()
        gc.enable()
        work()
        attempt.run.report.summary()
        HEARTBEAT.finish()
    except StopRequested as request:
        code = attempt.stopped(request)
    except Exception as error:
        return attempt.failed(error)
    finally:
        stop.ignore()
        gc.disable()  # vLLM's engine undoes `freeze` as it ends: all that was imported would be searched again, three times
        leaving.freeze()
        attempt.close()
        gc.freeze()  # for `leave`, which would look through all of it for files
    # All end together: srun kills the ranks that are left at once after an exit code other than 0, NeMo-Run's after a minute.
    grid.everyone.barrier()
    distributed.shutdown()
    return code


def agree(config: Config, grid: ProcessGrid) -> None:
    """Every rank has resolved the command line for itself, and a recipe that is not shared may differ between nodes.

    Raises:
        ValueError: on every rank, with the keys in which another rank's recipe is not rank 0's.
    """
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
    problem = None if config.launch.preflight == "off" else limits_in_the_way(config)
    if problem is not None:
        print(f"megatron-rl: {problem}", file=sys.stderr, flush=True)
    return problem is None


def _fit(config: Config, grid: ProcessGrid) -> bool:
    """Pre-flight, as far as the recipe wants it; what it finds is on the terminal."""
    if config.launch.preflight == "off":
        return True
    try:
        report = preflight(config, grid.everyone, full=config.launch.preflight == "full")
    except ConnectionError as error:
        print(f"megatron-rl: {error}", file=sys.stderr, flush=True)
        return False
    write_report(report, config, grid.everyone.rank)
    if grid.everyone.is_main:
        print(
            f"megatron-rl: {report.text()}" if report.failed else report.text(),
            file=sys.stderr if report.failed else None,
        )
    return not report.failed
