"""One rank of `megatron-rl preflight`, with the world in its environment."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from megatron_rl.config import ConfigError, Machine, check, load_recipe
from megatron_rl.config.machine import count_gpus
from megatron_rl.preflight.local import limits_in_the_way
from megatron_rl.preflight.verdict import FAILED
from megatron_rl.runtime import exit_codes, stop


def main(recipe: str, overrides: Sequence[str], full: bool, minutes: float, as_json: bool) -> int:
    """Runs on every rank; rank 0 prints the report. The recipe's own problems on this node are findings like any other."""
    config = load_recipe(recipe, overrides)
    problem = limits_in_the_way(config)
    if problem is not None:
        print(f"megatron-rl: {problem}", file=sys.stderr, flush=True)
        return exit_codes.PREFLIGHT
    # With too few open files, say, torch could not be imported.
    import torch.distributed as dist

    from megatron_rl.preflight.across_ranks import preflight, write_report
    from megatron_rl.preflight.meeting import RendezvousError, meet

    extra = []
    try:
        # A launcher has made the world: the layout has to fit it.
        config = check(config, machine=Machine(gpus=count_gpus(), world_size=int(os.environ["WORLD_SIZE"])))
    except ConfigError as error:
        extra = [("recipe", FAILED, line) for line in str(error).splitlines()]
    try:
        ranks = meet(minutes)
        report = preflight(config, ranks, full, extra)
        write_report(report, config, ranks.rank)
        if ranks.rank == 0:
            print(report.json() if as_json else report.text())
        ranks.barrier()
    except (RendezvousError, ConnectionError) as error:
        print(f"megatron-rl: {error}", file=sys.stderr, flush=True)
        return exit_codes.PREFLIGHT
    dist.destroy_process_group()
    return exit_codes.PREFLIGHT if report.failed else exit_codes.OK


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m megatron_rl.preflight.rank_main")
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--minutes", type=float, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # there is nothing to save
    stop.let_through()
    args = _arguments()
    sys.exit(main(args.recipe, args.overrides, not args.quick, args.minutes, args.json))
