"""What one rank runs. Started by `megatron-rl` (or torchrun, or srun) with the world in its environment."""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.checkpoint import owner
from megatron_rl.checkpoint.owner import OwnedError, Ownership
from megatron_rl.runtime import disk, exit_codes, postmortem, provenance, streams
from megatron_rl.runtime.progress import PROGRESS, Deadlines
from megatron_rl.runtime.spawn import ATTEMPT, new_attempt
from megatron_rl.runtime.stop import StopFlag, StopRequested
from megatron_rl.runtime.watchdog import Watchdog, stacks

if TYPE_CHECKING:
    from megatron_rl.config import Config
    from megatron_rl.runtime.distributed import Grid


def main(command: str, run_dir: str, recipe: str, resume: str = "auto") -> int:
    """Runs `train`, `sft` or `evaluate` on this rank, by the resolved recipe in the file `recipe`; returns the exit code."""
    stop = StopFlag()  # before anything that takes time
    quiet_known_warnings()
    # Imported here: the launcher sets the environment that torch and vLLM read on import.
    import torch

    from megatron_rl.checkpoint.store import CheckpointError
    from megatron_rl.config import load_recipe, to_yaml
    from megatron_rl.rewards import RewardError
    from megatron_rl.rollout.sync import SyncError
    from megatron_rl.runtime import distributed
    from megatron_rl.trainer.context import build_run
    from megatron_rl.trainer.evaluate import evaluate_only
    from megatron_rl.trainer.loop import train
    from megatron_rl.trainer.memory import memory_parts
    from megatron_rl.trainer.sft import sft

    config = load_recipe(recipe)
    torch.manual_seed(config.seed)
    attempt = os.environ.get(ATTEMPT)
    # From before the ranks look for each other, where the launcher has told them their folder.
    watchdog = (
        _watch(config, Path(attempt), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if attempt else None
    )
    if not _within_limits(config):
        return exit_codes.PREFLIGHT
    try:
        grid = distributed.initialize(
            config.actor.parallel, config.launch.timeout_minutes, _gpu_timeout_minutes(config)
        )
    except Exception as error:
        if watchdog is None:
            raise
        return _fail(error, False, config, watchdog)
    if watchdog is None:  # torchrun
        attempt = grid.broadcast(str(new_attempt(Path(run_dir))) if grid.is_main else "")
        watchdog = _watch(config, Path(attempt), grid.rank, grid.world)
    run, code = None, exit_codes.OK
    ownership = owner.of_this_rank(Path(run_dir), os.environ) if grid.is_main else None
    try:
        _take(ownership, grid)
        if grid.is_main:
            provenance.write(watchdog.attempt)
            disk.replace(watchdog.attempt / "recipe.yaml", to_yaml(config))
        agree(config, grid)
        if not _fit(config, grid):
            return exit_codes.PREFLIGHT
        if command == "evaluate":  # every response is kept as it comes: nobody has to be waited for
            stop.end_at_once(functools.partial(_end_evaluation, ownership))
        run = build_run(config, grid, Path(run_dir), command, stop)
        run.ownership = ownership
        PROGRESS.memory_parts = functools.partial(memory_parts, run)
        {"train": train, "sft": sft, "evaluate": evaluate_only}[command](run, resume)
        run.report.summary()
        PROGRESS.finish()
    except StopRequested as request:
        if grid.is_main:
            print(f"megatron-rl: {request}; {_how_to_continue(Path(run_dir))}", file=sys.stderr)
        code = _stop_code(request.signum)
    except Exception as error:
        # Expected failures explain themselves: a traceback would bury the explanation, so it goes to a file only.
        expected = (ValueError, OSError, CheckpointError, RewardError, SyncError, FloatingPointError, OwnedError)
        return _fail(error, isinstance(error, expected), config, watchdog, ownership)
    finally:
        stop.ignore()
        if run is not None:
            run.close()
        if ownership is not None:
            ownership.release()
        watchdog.stop()
    # All end together: srun kills the ranks that are left at once after an exit code other than 0, NeMo-Run's after a minute.
    grid.barrier()
    distributed.shutdown()
    return code


def _take(ownership: Ownership | None, grid: Grid) -> None:
    """Makes the run folder this run's, on every rank.

    Raises:
        OwnedError: another run writes there.
    """
    error = None
    if ownership is not None:
        try:
            ownership.take()
        except OwnedError as refusal:
            error = str(refusal)
    error = grid.broadcast(error)
    if error is not None:
        raise OwnedError(error)


def agree(config: Config, grid: Grid) -> None:
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


def _within_limits(config: Config) -> bool:
    """The part of the pre-flight that cannot wait until the ranks have found each other."""
    from megatron_rl.preflight.local import limits_in_the_way

    problem = None if config.launch.preflight == "off" else limits_in_the_way(config)
    if problem is not None:
        print(f"megatron-rl: {problem}", file=sys.stderr, flush=True)
    return problem is None


def _fit(config: Config, grid: Grid) -> bool:
    """Pre-flight, as far as the recipe wants it; what it finds is on the terminal."""
    from megatron_rl.preflight import preflight
    from megatron_rl.preflight.run import write_report

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


def _watch(config: Config, attempt: Path, rank: int, world: int) -> Watchdog:
    recipe, minute = config.watchdog, 60.0
    deadlines = Deadlines(
        recipe.default_minutes * minute,
        {phase: minutes * minute for phase, minutes in recipe.phases.items()},
        recipe.first_time_minutes * minute,
    )
    watchdog = Watchdog(attempt, rank, world, deadlines if recipe.enabled else None, _facts)
    watchdog.start()
    return watchdog


def _gpu_timeout_minutes(config: Config) -> float:
    """At NCCL's own deadline torch aborts the process without a word: it must not come before the watchdog's."""
    recipe, own = config.watchdog, config.launch.timeout_minutes
    if not recipe.enabled:
        return own
    return max(own, max(recipe.default_minutes, *recipe.phases.values()) + recipe.first_time_minutes + 10)


def _facts(full: bool) -> dict[str, Any]:
    """What the runtime knows of this rank: for a heartbeat, or in full for a post-mortem."""
    from megatron_rl.runtime import collectives, memory

    recent, waiting = collectives.recent(64 if full else 1)
    facts = {"collective": recent[-1] if recent else None, "pending": waiting}
    if not full:
        return facts | {"host_gib": round(memory.host_in_use(), 2)}
    return facts | {"collectives": recent, "memory_gib": memory.in_use()}


def _fail(
    error: Exception, expected: bool, config: Config, watchdog: Watchdog, ownership: Ownership | None = None
) -> int:
    """Post-mortem and last words of a rank that met an error; the exit code.

    Args:
        ownership: rank 0's, of the run folder.
    """
    from megatron_rl.checkpoint.store import CheckpointError
    from megatron_rl.runtime import collectives, memory

    if collectives.gave_up(error):
        watchdog.end_stalled(f"a collective gave up after launch.timeout_minutes = {config.launch.timeout_minutes:g}")
    text = f"{type(error).__name__}: {error}"
    gone = not Path(config.run_dir).is_dir() if ownership is None else ownership.is_gone()
    if gone and isinstance(error, OSError | CheckpointError):
        text = owner.gone(Path(config.run_dir))
    out_of_memory = memory.is_out_of_memory(error)
    try:
        parts = PROGRESS.memory_parts()
    except RuntimeError:  # a device that has failed answers nothing any more
        parts = {}
    table = memory.table(parts, memory.in_use(), PROGRESS.memory_peaks())
    about = {"error": text, "versions": provenance.versions(), "memory": table.splitlines(), **_facts(True)}
    if not gone:  # else what is there now would be given a post-mortem of another run
        with contextlib.suppress(OSError):  # the disk may be what failed
            postmortem.write_rank(watchdog.folder, about, traceback.format_exc() + "\n" + stacks())
    place = watchdog.folder / f"rank_{PROGRESS.rank}.txt"
    if out_of_memory:
        help_ = "\n".join(f"  {line}" for line in memory.remedies(PROGRESS.phase, config))
        where = postmortem.place(PROGRESS.record())
        print(
            f"megatron-rl: out of memory {where}, on rank {PROGRESS.rank} (node {PROGRESS.host}): {text}\n"
            f"memory in GiB:\n{_indented(table)}\nwhat would help here, what costs least first:\n{help_}\n"
            f"(where it happened: {place}; docs/out-of-memory.md)",
            file=sys.stderr,
        )
        return exit_codes.OUT_OF_MEMORY
    if not expected:
        traceback.print_exception(error)
        return exit_codes.FAILED
    print(f"megatron-rl: {text}\n(where it happened: {place})", file=sys.stderr)
    return exit_codes.BAD_INPUT if isinstance(error, ValueError) else exit_codes.FAILED


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _stop_code(signum: int) -> int:
    """A person's Ctrl-C or kill is as in a shell; what a batch system sends means: another time."""
    from_batch = signum == signal.SIGUSR1 or (signum == signal.SIGTERM and "SLURM_STEP_ID" in os.environ)
    return exit_codes.AGAIN if from_batch else 128 + signum


def _end_evaluation(ownership: Ownership | None, signum: int) -> None:
    """In a signal handler: rank 0 says how to continue, and this process ends."""
    if ownership is not None:
        text = f"megatron-rl: {StopRequested(signum)}; the same command continues with the responses that are there\n"
        os.write(sys.stderr.fileno(), text.encode())
        ownership.release()
    os._exit(_stop_code(signum))


def _how_to_continue(run_dir: Path) -> str:
    from megatron_rl.checkpoint import store

    newest = store.newest_of_run(run_dir)
    if newest is None:
        return "there is no checkpoint to continue from (see checkpoint.every)"
    return f"the same command continues from {store.name_of(newest)}"


def quiet_known_warnings() -> None:
    """Warnings that say nothing to a user of this package: Megatron-Core's about optional parts and torch's deprecations."""
    warnings.filterwarnings("ignore", message="Apex is not installed")
    warnings.filterwarnings("ignore", message="When using async grad allreduce it is recommended")
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf Tensor")
    warnings.filterwarnings("ignore", message="`torch.distributed.reduce_op` is deprecated")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\..*")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch\.distributed|megatron\.core)\..*")


def _arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m megatron_rl.trainer.main")
    parser.add_argument("command", choices=("train", "sft", "evaluate"))
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--recipe", required=True, metavar="FILE", help="the resolved recipe")
    parser.add_argument("--resume", default="auto")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    args = _arguments()
    streams.accept_any_text()
    sys.exit(main(args.command, args.run_dir, args.recipe, args.resume))
