"""`python -m tests.random_layouts 37 cut.tensor=1`: one case, or what is left of it; one that fails is made smaller.

`--count 1000`: so many from that number on, those of a world in the same processes; which fail, and why.
`--refused`: what the recipe's checks say against draws, by family.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # as tests/conftest.py

import numpy as np

from .cases import DIVISIONS, FAMILIES, IMPOSSIBLE, refusals
from .draw import attempt, draw
from .prove import prove, prove_one
from .smaller import command, overridden, shrunk

LOT = 200  # cases that share worlds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.random_layouts", description=__doc__)
    parser.add_argument("number", type=int, nargs="?", default=0)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--fault", default="", help="one of tests/random_layouts/faults.py, put into the ranks")
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--refused", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.refused:
        print_refusals()
        return 0
    if args.count:
        return prove_many(range(args.number, args.number + args.count), args.fault)
    case = overridden(draw(args.number), dict(text.split("=", 1) for text in args.overrides))
    print(case)
    if refused := refusals(case):
        print("refused:", *refused, sep="\n  ")
        return 2
    found = prove_one(case, args.fault)
    if not found:
        print("the same as in one process")
        return 0
    print(*found, sep="\n")
    if not args.overrides:
        print("\nsmaller, it fails with:", command(shrunk(case, lambda step: prove_one(step, args.fault))))
    return 1


def prove_many(numbers: Sequence[int], fault: str) -> int:
    """Draws lot by lot: worlds are started once for each. Returns 1 where one fails."""
    begin, failed = time.perf_counter(), 0
    for at in range(0, len(numbers), LOT):
        lot = [draw(number) for number in numbers[at : at + LOT]]
        with TemporaryDirectory() as root:
            try:
                found = prove(lot, Path(root), fault)
            except Exception:  # a rank's error ends its world: whose it is, each alone says
                found = {case.number: prove_one(case, fault) for case in lot}
        for number, differences in found.items():
            if differences:
                failed += 1
                print(number, *differences, sep="\n  ", flush=True)
        seconds = time.perf_counter() - begin
        print(f"{at + len(lot)} draws, {failed} failed, {seconds:.0f} s", flush=True)
    return int(failed > 0)


def print_refusals(draws: int = 40) -> None:
    for family in FAMILIES:
        passed, said = dict[str, int](), Counter[str]()
        for division in DIVISIONS:
            if (family, division) in IMPOSSIBLE:
                continue
            every = [refusals(attempt(n, np.random.default_rng(n), family, division)) for n in range(draws)]
            passed[division] = sum(not refused for refused in every)
            said.update({re.sub(r"\d+", "N", text)[:110] for refused in every for text in refused})
        print(f"{family}: of {draws} draws each pass", ", ".join(f"{name} {n}" for name, n in passed.items()))
        for text, times in said.most_common():
            print(f"{times:6} {text}")


if __name__ == "__main__":
    sys.exit(main())
