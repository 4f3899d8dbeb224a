"""`megatron-rl replay RUN`: a recorded step's rewards, computed again from its texts, without model, prompts and agents.

The run records its rollouts every `logging.record_every` steps, responses and whole conversations. Rewards that are functions
of what was written are computed again, with the recipe's parameters or changed ones; what an agent returned is as it was
recorded. Rewards that ask a server, and those with a number per token, are not computed. Every rollout whose reward is
another one is named.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_rl.runtime import exit_codes


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="run folder")
    parser.add_argument(
        "overrides",
        metavar="KEY=VALUE",
        nargs="*",
        default=[],
        help="overrides of rewards, e.g. rewards.short.params.limit=200; rewards.short=null leaves one out",
    )
    parser.add_argument("--step", metavar="N", type=int, help="which recorded step (default: the last)")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="every rollout with its rewards then and now, as JSON lines"
    )


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 1 where a reward is not what it was."""
    from megatron_rl.comparison.replayed_rewards import replay

    same = replay(args.run_dir, step=args.step, overrides=args.overrides, out=args.out)
    return exit_codes.OK if same else exit_codes.FAILED
