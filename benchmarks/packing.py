"""How even the packing is: tokens and attention of data-parallel ranks, micro-batches over the fewest possible.

python -m benchmarks.packing [--ranks 8] [--budget 16384] [--seeds 20]

Lengths are log-normal (median 700, sigma 0.9) between 64 and 4,096. Of each step's ranks the fullest over the mean, in per
cent: tokens, and squared lengths, which attention costs. Beside it first-fit-decreasing over the whole batch, its bins dealt
to the ranks in turn, and what no division can beat: the longest sequence's square over the mean. Medians over seeds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.others import told
from megatron_rl.actor.packing import first_fit, plan

SIZES = (32, 64, 128, 256, 512, 4096)


def lengths_of(count: int, seed: int) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(np.log(700), 0.9, count)
    return [int(length) for length in np.clip(drawn, 64, 4096)]


def excess(ranks: Sequence[Sequence[int]], costs: Sequence[float]) -> float:
    """Of the fullest rank over the mean, in per cent."""
    totals = [sum(costs[i] for i in rank) for rank in ranks]
    return 100 * (max(totals) / (sum(totals) / len(totals)) - 1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--budget", type=int, default=16384)
    parser.add_argument("--seeds", type=int, default=20)
    args = parser.parse_args(arguments)
    columns = (
        "micro-batches over the fewest",
        "tokens %",
        "first-fit",
        "squares %",
        "first-fit",
        "no less than",
        "CPU ms",
    )
    table = Table("sequences", *columns)
    for count in SIZES:
        rows = []
        for seed in range(args.seeds):
            lengths = lengths_of(count, seed)
            squares = [float(length) ** 2 for length in lengths]
            begin = time.process_time()
            planned = plan(lengths, range(count), args.ranks, args.budget)
            seconds = time.process_time() - begin
            ranks = [[i for micro in rank for i in micro] for rank in planned]
            bins = first_fit(lengths, args.budget)
            dealt = [[i for indices in bins[rank :: args.ranks] for i in indices] for rank in range(args.ranks)]
            fewest = max(-(-sum(lengths[i] for i in rank) // args.budget) for rank in ranks)
            rows.append(
                (
                    len(planned[0]) - fewest,
                    excess(ranks, lengths),
                    excess(dealt, lengths),
                    excess(ranks, squares),
                    excess(dealt, squares),
                    max(0.0, 100 * (max(squares) * args.ranks / sum(squares) - 1)),
                    1000 * seconds,
                )
            )
        most, *rest = zip(*rows, strict=True)
        table.add_row(f"{count:,}", f"{sum(most)} of {args.seeds} steps", *(f"{median(values):.2f}" for values in rest))
    Console(highlight=False, width=130).print(table)
    return 0


if __name__ == "__main__":
    with told():
        sys.exit(main())
