"""Random models at random layouts, each against the same in one process: tests/random_layouts."""

from __future__ import annotations

import os
import warnings

os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # as tests/conftest.py

from tests.fuzz.loop import run
from tests.random_layouts.draw import draw
from tests.random_layouts.prove import prove_one
from tests.random_layouts.smaller import command


def try_case(number: int) -> None:
    case = draw(number)
    found = prove_one(case)
    assert not found, "\n".join([*found, f"this makes it smaller: {command(case)}"])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run(try_case, "layouts")
