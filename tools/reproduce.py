"""Regenerates the papers' claims that need no large model as pages with tables and figures.

python tools/reproduce.py gdpo|dgpo|shrinkage|awpo|all [--out build/reproduced]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from reproduced.page import PAGES, make_page, write_page

FOLDER = Path(__file__).resolve().parents[1] / "build" / "reproduced"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=(*PAGES, "all"), help="which paper")
    parser.add_argument(
        "--out", type=Path, default=FOLDER, help="folder for NAME.md and NAME.png (default: build/reproduced)"
    )
    args = parser.parse_args(arguments)
    for name in PAGES if args.name == "all" else [args.name]:
        begin = time.perf_counter()
        write_page(make_page(name), name, args.out)
        print(f"{args.out / name}.md and .png, {time.perf_counter() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
