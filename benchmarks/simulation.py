"""The simulated time of generation against real runs': `python -m benchmarks.simulation --fit RUN RUN --predict RUN`.

An engine's pass takes `base + each x running` seconds; the two are fitted to `timing_s/generate` of the runs to fit, and then
say how long the other run's steps should have taken. Runs need `logging.record_every=1`, whose lengths the simulation draws,
and prompts that were not drawn before, so that it hands them out as the run did.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_rl.planning.simulation.engines import EngineSpeed, generate
from megatron_rl.planning.time.lengths import read_lengths
from megatron_rl.report.run_record import read_run


@dataclass(frozen=True)
class Recorded:
    """Steps of a run."""

    path: Path
    lengths: Sequence[np.ndarray]
    seconds: np.ndarray  # float64 [steps], of generation
    engines: int
    concurrent: int
    prompt: float

    def simulated(self, base: float, each: float) -> np.ndarray:
        speed = EngineSpeed(lambda running, _: base + each * running, lambda _: 0.0, float("inf"), self.concurrent)
        return np.array(
            [
                generate(speed, self.engines, self.prompt, np.zeros_like(tokens), tokens, range(len(tokens))).seconds
                for tokens in self.lengths
            ]
        )


def read(path: Path) -> Recorded:
    run = read_run(path)
    rollout, processes = run.recipe["rollout"], run.recipe["launch"]["processes"]
    rows, lengths = run.steps(), read_lengths(path)
    if len(rows) != len(lengths):
        raise ValueError(
            f"{path}: {len(rows)} steps, {len(lengths)} of them recorded; logging.record_every=1 records all"
        )
    return Recorded(
        path,
        lengths[1:],  # the first step starts caches
        np.array([row["timing_s/generate"] for row in rows[1:]]),
        processes // rollout["tensor_parallel"],
        rollout["max_concurrent"],
        rows[0]["prompt_length/mean"],
    )


def fit(runs: Sequence[Recorded], rounds: int = 10) -> tuple[float, float]:
    """Base and each, by the least squares of relative errors. While the hand-out is the same, seconds are linear in them."""
    measured = np.concatenate([run.seconds for run in runs])
    base, each = 0.01, 1e-4
    for _ in range(rounds):
        now, more = (np.concatenate([run.simulated(base, slope) for run in runs]) for slope in (each, 1.01 * each))
        of_each = (more - now) / (0.01 * each)
        of_base = (now - each * of_each) / base
        found = np.linalg.lstsq(
            np.stack([of_base, of_each], 1) / measured[:, None], np.ones_like(measured), rcond=None
        )[0]
        base, each = max(float(found[0]), 1e-6), max(float(found[1]), 1e-9)
    return base, each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", type=Path, nargs="+", required=True, metavar="RUN")
    parser.add_argument("--predict", type=Path, nargs="+", required=True, metavar="RUN")
    args = parser.parse_args()
    base, each = fit([read(path) for path in args.fit])
    print(f"a pass takes {1e3 * base:.2f} ms and {1e6 * each:.1f} µs per sequence")
    for run in map(read, args.predict):
        found = run.simulated(base, each)
        errors = found / run.seconds - 1
        print(
            f"{run.path.name}, {run.concurrent} at a time: {run.seconds.sum():.2f} s measured in {len(errors)} steps, "
            f"{found.sum():.2f} s simulated ({found.sum() / run.seconds.sum() - 1:+.0%}); a step's error in the median "
            f"{np.median(np.abs(errors)):.0%}, measured times vary by {np.std(run.seconds) / np.mean(run.seconds):.0%}"
        )


if __name__ == "__main__":
    main()
