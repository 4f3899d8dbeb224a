"""Regenerates the papers' claims as pages with tables and figures: what can be computed, and (NAME-runs) what takes training.

python tools/reproduce.py gdpo|dgpo|shrinkage|awpo|all [--out build/reproduced]
python tools/reproduce.py gdpo-runs|dgpo-runs|shrinkage-runs|awpo-runs [--seeds 8]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from reproduced import runs
from reproduced.page import PAGES, make_page, write_page

FOLDER = Path(__file__).resolve().parents[1] / "build" / "reproduced"
TRAINED = {f"{name}-runs": name for name in runs.CLAIMS}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=(*PAGES, *TRAINED, "all"), help="which paper; NAME-runs trains")
    parser.add_argument("--seeds", type=int, default=8, metavar="N", help="of each recipe that is trained (default: 8)")
    parser.add_argument(
        "--out", type=Path, default=FOLDER, help="folder for NAME.md and NAME.png (default: build/reproduced)"
    )
    args = parser.parse_args(arguments)
    for name in (*PAGES, *TRAINED) if args.name == "all" else [args.name]:
        begin = time.perf_counter()
        page = runs.make(TRAINED[name], args.seeds) if name in TRAINED else make_page(name)
        write_page(page, name, args.out)
        print(f"{args.out / name}.md and .png, {time.perf_counter() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
