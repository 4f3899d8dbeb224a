"""`megatron-rl compare RUN`: what every estimator and surrogate would have done with rollouts that a run recorded.

The run records its rollouts every `logging.record_every` steps. Methods run at their default parameters, unless `--params`
says otherwise; the line `run` is what the run itself used.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from megatron_rl.config.algorithm import Ratio
from megatron_rl.runtime import exit_codes


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="run folder")
    parser.add_argument("--step", metavar="N", type=int, help="which recorded step (default: the last)")
    parser.add_argument(
        "--estimator",
        metavar="NAME",
        default="run",
        help="whose advantages the surrogates see (default: the run's own)",
    )
    parser.add_argument("--ratio", default="token", choices=get_args(Ratio), help="level of the ratio (default: token)")
    parser.add_argument(
        "--plugins",
        metavar="FILE",
        nargs="+",
        help="Python files or modules with estimators and surrogates of your own (default: those of the run's recipe)",
    )
    parser.add_argument(
        "--params",
        metavar="METHOD.KEY=VALUE",
        nargs="+",
        default=[],
        help="parameters that are not at their defaults, e.g. clip.eps_high=0.28",
    )
    parser.add_argument(
        "--plot", metavar="FILE", type=Path, help="where the plot goes (default: RUN/compare_step_<n>.png)"
    )


def run(args: argparse.Namespace) -> int:
    from megatron_rl.comparison.recorded_run import compare

    compare(
        args.run_dir,
        step=args.step,
        estimator=args.estimator,
        ratio=args.ratio,
        plugins=args.plugins,
        params=args.params,
        plot=args.plot,
    )
    return exit_codes.OK
