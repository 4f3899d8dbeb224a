"""`megatron-rl prove-resume RECIPE`: whether a killed run, continued, is the run that was never killed, bit for bit.

For every preset: one run without interruption, and one whose processes are all killed with SIGKILL at points drawn at
random, as many in each of generation, reward, training, sync and save, and with agents after a turn of a conversation, and
that is started again after each. Then metrics (all but times and memory), samples, every tensor of the last checkpoint
(weights and optimizer), the estimator's state and the export are compared. In every run Python's, NumPy's and torch's
generators get another random state at every phase, so that a state which a checkpoint would have to carry shows. The
recipe's warm-up, if it has one, is run once for all presets.

Without a GPU, ranks are forked from two processes that have imported everything and done nothing, in turn, so that a start
takes a few seconds; the two have other hash seeds, as any two processes. With one, or with --fresh, each is a new process.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron_rl.base.messages import ConfigError
from megatron_rl.config.machine import count_gpus
from megatron_rl.config.presets import list_presets
from megatron_rl.resume_proof.points import POINTS
from megatron_rl.runtime import exit_codes


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("recipe", metavar="RECIPE", type=Path, help="YAML file")
    parser.add_argument(
        "overrides", metavar="KEY=VALUE", nargs="*", default=[], help="overrides, e.g. algorithm.kl.coef=0.01"
    )
    parser.add_argument(
        "--presets", metavar="all|A,B", default="", help="all, or names with commas between; default: the recipe's own"
    )
    parser.add_argument(
        "--plugins",
        metavar="FILE",
        nargs="+",
        help="Python files or modules, in place of the recipe's algorithm.plugins",
    )
    parser.add_argument("--kills", metavar="N", type=int, default=10, help="kills for every preset (default 10)")
    parser.add_argument(
        "--parts",
        metavar="A,B",
        default="",
        help=f"parts of a step in which kills come: {', '.join(POINTS)}; default: all that the run has",
    )
    parser.add_argument("--steps", metavar="N", type=int, default=4, help="RL steps of a run (default 4)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the points")
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        default=Path("runs/prove_resume"),
        help="folder for the runs and table.md (default runs/prove_resume)",
    )
    parser.add_argument("--fresh", action="store_true", help="start every rank as a new process")


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 1 where anything differs or a kill came too late.

    Raises:
        ConfigError: an unknown preset, or a recipe that cannot run.
    """
    names = list_presets() if args.presets == "all" else tuple(filter(None, args.presets.split(",")))
    if unknown := sorted(set(names) - set(list_presets())):
        raise ConfigError(f"--presets {unknown[0]}: there is no such preset; choose from {', '.join(list_presets())}")
    step_parts = tuple(filter(None, args.parts.split(",")))
    if unknown := sorted(set(step_parts) - set(POINTS)):
        raise ConfigError(f"--parts {unknown[0]}: a step has no such part; choose from {', '.join(POINTS)}")
    overrides = list(args.overrides)
    if args.plugins is not None:
        overrides.append(f"algorithm.plugins={json.dumps(args.plugins)}")

    from megatron_rl.resume_proof.proof import prove_all
    from megatron_rl.resume_proof.starts import Forge, start_anew

    forges = [] if args.fresh or count_gpus() else [Forge(), Forge()]
    try:
        proofs = prove_all(
            args.recipe,
            overrides,
            names or ("",),
            args.out,
            kills=args.kills,
            steps=args.steps,
            seed=args.seed,
            starts=forges or [start_anew],
            step_parts=step_parts,
        )
    finally:
        for each in forges:
            each.close()
    return exit_codes.FAILED if any(proof.differences or proof.missed for proof in proofs) else exit_codes.OK
