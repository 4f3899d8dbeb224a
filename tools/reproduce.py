"""Regenerates docs/reproduced: the papers' claims that can be computed (seconds), and those that are trained (NAME-runs).

python tools/reproduce.py all|gdpo|dgpo|shrinkage|awpo [--out docs/reproduced]
python tools/reproduce.py gdpo-runs|length-runs|... [--seeds 8] [--first 0]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from reproduced import runs
from reproduced.page import PAGES, make_page, write_figure, write_page
from reproduced.stated import CLAIMS
from reproduced.training_page import RECORDS, write_training

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reproduced"
TRAINED = {f"{name}-runs": name for name in CLAIMS}
LEAST_SEEDS, MOST_SEEDS = 6, 16  # of 5 no difference is significant at 5 %; the test takes 16


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=(*PAGES, *TRAINED, "all"), help="which paper; NAME-runs trains")
    parser.add_argument("--seeds", type=int, default=8, metavar="N", help="of each recipe that is trained (default: 8)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first of them (default: 0)")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the pages (default: docs/reproduced)")
    args = parser.parse_args(arguments)
    if not LEAST_SEEDS <= args.seeds <= MOST_SEEDS:
        parser.error(f"--seeds {args.seeds}: {LEAST_SEEDS} to {MOST_SEEDS}, fewer show no difference at 5 %")
    seeds = range(args.first, args.first + args.seeds)
    for name in (*PAGES, *TRAINED) if args.name == "all" else [args.name]:
        begin = time.perf_counter()
        written = _train(TRAINED[name], seeds, args.out) if name in TRAINED else _compute(name, args.out)
        print(f"{written}, {time.perf_counter() - begin:.0f} s", flush=True)
    return 0


def _compute(name: str, folder: Path) -> Path:
    write_page(make_page(name), name, folder)
    return folder / f"{name}.md"


def _train(name: str, seeds: Sequence[int], folder: Path) -> Path:
    """Takes a claim's runs, records their numbers and writes the page of all claims anew."""
    made, trained = runs.make(name, seeds), CLAIMS[name]
    made.record.write(folder / RECORDS / f"{name}.json")
    write_figure(lambda figure: made.draw(figure, trained), made.size, folder / f"{name}-runs.png")
    return write_training(folder, {name: one.claim for name, one in CLAIMS.items()})


if __name__ == "__main__":
    sys.exit(main())
