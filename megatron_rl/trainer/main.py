"""What one rank runs. Started by `megatron-rl` (or torchrun, or srun) with the world in its environment."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.runtime import exit_codes
from megatron_rl.runtime.stop import StopFlag, StopRequested


def main(command: str, run_dir: str, resume: str = "auto") -> int:
    """Runs `train`, `sft` or `evaluate` on this rank, by the resolved recipe in the run folder; returns the exit code."""
    stop = StopFlag()  # before anything that takes time
    quiet_known_warnings()
    # Imported here: the launcher sets the environment that torch and vLLM read on import.
    import torch

    from megatron_rl.checkpoint.store import CheckpointError
    from megatron_rl.config import load_recipe
    from megatron_rl.rewards import RewardError
    from megatron_rl.rollout.sync import SyncError
    from megatron_rl.runtime import distributed
    from megatron_rl.trainer.context import build_run
    from megatron_rl.trainer.evaluate import evaluate_only
    from megatron_rl.trainer.loop import train
    from megatron_rl.trainer.sft import sft

    config = load_recipe(Path(run_dir) / "recipe.yaml")
    torch.manual_seed(config.seed)
    grid = distributed.initialize(config.actor.parallel, config.launch.timeout_minutes)
    run = None
    try:
        run = build_run(config, grid, Path(run_dir), command, stop)
        {"train": train, "sft": sft, "evaluate": evaluate_only}[command](run, resume)
        run.report.summary()
    except StopRequested as request:
        if grid.is_main:
            print(f"megatron-rl: {request}; {_how_to_continue(Path(run_dir))}", file=sys.stderr)
        return _stop_code(request.signum)
    except (ValueError, OSError, CheckpointError, RewardError, SyncError, FloatingPointError) as error:
        # Expected failures explain themselves; a traceback would bury the explanation, so it goes to a file.
        place = Path(run_dir) / "logs" / f"traceback_rank_{grid.rank}.txt"
        with contextlib.suppress(OSError):  # the disk may be what failed
            place.write_text(traceback.format_exc())
        print(f"megatron-rl: {type(error).__name__}: {error}\n(where it happened: {place})", file=sys.stderr)
        return exit_codes.BAD_INPUT if isinstance(error, ValueError) else exit_codes.FAILED
    finally:
        if run is not None:
            run.close()
    distributed.shutdown()
    return exit_codes.OK


def _stop_code(signum: int) -> int:
    """A person's Ctrl-C or kill is as in a shell; what a batch system sends means: another time."""
    from_batch = signum == signal.SIGUSR1 or (signum == signal.SIGTERM and "SLURM_STEP_ID" in os.environ)
    return exit_codes.AGAIN if from_batch else 128 + signum


def _how_to_continue(run_dir: Path) -> str:
    from megatron_rl.checkpoint.store import newest as newest_checkpoint

    newest = newest_checkpoint(run_dir / "checkpoints")
    if newest is None:
        return "there is no checkpoint to continue from (see checkpoint.every)"
    return f"the same command continues from {newest.name}"


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
    parser.add_argument("--resume", default="auto")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    args = _arguments()
    sys.exit(main(args.command, args.run_dir, args.resume))
