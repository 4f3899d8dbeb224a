"""`python -m tests.random_layouts 37 cut.tensor=1`: one case, or what is left of it; one that fails is made smaller.

`--refused`: what the recipe's checks say against draws, by family.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from collections import Counter

os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # as tests/conftest.py

import numpy as np

from .draw import DIVISIONS, FAMILIES, IMPOSSIBLE, attempt, command, draw, overridden, refusals
from .prove import prove_one, shrunk


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.random_layouts", description=__doc__)
    parser.add_argument("number", type=int, nargs="?", default=0)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--fault", default="", help="one of tests/random_layouts/faults.py, put into the ranks")
    parser.add_argument("--refused", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.refused:
        print_refusals()
        return 0
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
